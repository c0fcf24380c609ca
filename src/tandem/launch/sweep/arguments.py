"""Names of TRL and transformers that are no option here and yet may stand in an experiment file: those that make no
difference, and those that are right with one value. What others are here says config/foreign.py."""

from collections.abc import Mapping
from typing import Any

# Whatever they say, the same is learned: why.
IMMATERIAL: Mapping[str, str] = {
    **dict.fromkeys(("local_rank", "ddp_backend"), "torchrun and the device decide"),
    **dict.fromkeys(("logging_dir", "log_on_each_node"), "metrics.jsonl and logs/ are in the run directory"),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "include_num_input_tokens_seen"),
        "every step is logged",
    ),
    **dict.fromkeys(("disable_tqdm", "log_level_replica"), "batch jobs have no progress bar"),
    "logging_nan_inf_filter": "metrics are written as they are",
    "remove_unused_columns": "only the columns that are needed are read",
    **dict.fromkeys(
        ("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        "rows are tokenized once, before training",
    ),
    **dict.fromkeys(
        ("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        "there is no data loader process",
    ),
    **dict.fromkeys(
        (
            "padding_free",
            "packing",
            "packing_strategy",
            "eval_packing",
            "pad_to_multiple_of",
            "pad_token",
            "padding_value",
        ),
        "sequences are always packed without padding",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_accumulation_steps", "precompute_ref_batch_size"),
        "evaluation packs micro-batches as training does",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "group_by_length", "length_column_name"), "packing makes lengths immaterial"
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "ranks are synchronized by FSDP2",
    ),
    **dict.fromkeys(
        (
            *("attn_implementation", "use_liger_kernel", "liger_kernel_config"),
            *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ),
        "the decoder chooses its kernels; checkpointing is never reentrant",
    ),
    **dict.fromkeys(
        ("torch_empty_cache_steps", "use_cache", "disable_dropout", "average_tokens_across_devices"),
        "the update does not depend on it here",
    ),
    **dict.fromkeys(("skip_memory_metrics", "tf32", "bf16_full_eval"), "memory and precision follow model.dtype"),
    **dict.fromkeys(
        ("eval_do_concat_batches", "eval_use_gather_object", "prediction_loss_only"), "evaluation keeps only metrics"
    ),
    "restore_callback_states_from_checkpoint": "a resumed run continues exactly",
    "dataloader_drop_last": "the last step of an epoch begins the next one",
    "save_on_each_node": "the file system is shared",
    "log_completions": "every rollout is under samples/",
    "num_completions_to_print": "every rollout is under samples/",
    "log_unique_prompts": "every rollout is under samples/",
    "ds3_gather_for_generation": "an inference server generates",
    "truncation_mode": "what is too long is cut at its end, prompts at their beginning",
}

# Accepted with the value that says what is done here anyway; refused with another.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "optim": (
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"),
        "the optimizer is AdamW; `distributed_config: DSZero2Offload` keeps its state in CPU memory",
    ),
    "do_train": ((True,), "a sweep trains"),
    "do_eval": ((True,), "held-out rows are evaluated if there are any; leave out eval_strategy and eval_size"),
    "do_predict": ((False,), "use the section `evaluation`"),
    "eval_delay": ((0,), "evaluation begins with training"),
    "save_only_model": ((False,), "checkpoints hold the optimizer, so that runs resume exactly"),
    "ignore_data_skip": ((False,), "a resumed run continues exactly, with the rows that come next"),
    "assistant_only_loss": ((True,), "only answers are learned; give data.learn_roles for others"),
    "completion_only_loss": ((True,), "only answers are learned; give data.learn_roles for others"),
    "dataset_text_field": (("text",), "give data.fields: {text: your_name}"),
    "auto_find_batch_size": ((False,), "leave out per_device_train_batch_size: micro-batches follow the GPU's memory"),
    "load_in_8bit": ((False,), "models are not quantized"),
    "load_in_4bit": ((False,), "models are not quantized"),
    "use_dora": ((False,), "LoRA and rsLoRA are there"),
    "push_to_hub": ((False,), "the model is in weights/latest, in the format of transformers"),
    "load_best_model_at_end": ((False,), "weights/latest is the last; checkpoint.keep_every keeps others"),
    "label_smoothing_factor": ((0,), "use label_smoothing, of dpo, cpo and simpo"),
    "fp16": ((False,), "half precision here is bfloat16; use bf16: true"),
    "fp16_full_eval": ((False,), "half precision here is bfloat16; use bf16: true"),
    "sync_ref_model": ((False,), "the reference model is the one that training starts from"),
    "activation_offloading": ((False,), "use gradient_checkpointing"),
    "shuffle_dataset": ((True,), "tasks are visited in random order"),
    "enable_jit_checkpoint": (
        (True,),
        "a signal saves a checkpoint; checkpoint.on_signal_timeout_s: 0 switches that off",
    ),
    "batch_eval_metrics": ((False,), "evaluation keeps only metrics"),
    "eval_on_start": ((False,), "`rl` evaluates before the first step in any case, `sft` and `align` do not"),
}

# What the experiment file says elsewhere.
ELSEWHERE: Mapping[str, str] = {
    "output_dir": "each run has its own folder below execution.output_dir; leave it out",
    "resume_from_checkpoint": "`sweep --resume` continues what failed from the newest checkpoint",
    "overwrite_output_dir": "runs are continued, never overwritten; use another execution.output_dir",
    "generate_during_eval": "use the section `evaluation`",
    **dict.fromkeys(
        ("fsdp", "deepspeed"), "use execution.distributed_config: DDP, DSZero2, DSZero3, DSZero3Offload, FSDP"
    ),
}
