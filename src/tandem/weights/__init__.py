"""Weights on their way from the trainer to engines: one file a way, its sink (the trainer publishes) and its source
(the engine takes) side by side.

    files           the run directory: what a resumed run, an export and every other server read
    shared_memory   memory of the machine, for processes that compute on a CPU
    cuda_ipc        memory of the GPU that trainer and server share
    in_process      a copy, for a trainer and an engine in one process
    in_place        no copy: trainer and engine in one process compute with the same weights

`ways` says what a sink, a source and a way consist of; `announced` chooses the way by deployment. All have one order of
events, on the trainer's side in `AnnouncedPublisher.publish`, on the engine's in `NativeEngine.update_weights`:

    trainer                          orchestrator                 engine
    1 published: held, announced ──► sees the version
      files; the next step           2 POST /update_weights ────► 3 checked: files, names, shapes
                                                                  4 paused between two steps
                                                                  5 swapped: the tensors are copied
                                                                  6 resumed: what was running is computed again
                                     7 version known ◄─────────── answer

In place there is nothing to copy: the swap is the optimizer step. The trainer has only its gradients when it publishes,
and makes the version while the engine is paused (`InPlace.write_when_paused`, `InPlace.wait_until_written`). Until the
orchestrator has asked for it, the engine serves the version before, so an evaluation meets one version only.

    1 gradients; announced ────────► sees the version
      waits                          2 POST /update_weights ────► 3 checked: it is announced
      ·                                                           4 paused between two steps
    5 optimizer step  ◄────────────────────────────────────────── · waits
      └─────────────────────────────────────────────────────────► 6 resumed
      files; the next step           7 version known ◄─────────── answer
"""
