"""The one table of names from elsewhere: TRL, transformers and PEFT, prime-rl, slime, verl and others → ours.

It is data: hints.py tells from it what an unknown key, flag or algorithm is here, and `sweep` takes the names of the
second column as they are. A name that is not here is an unknown key like any other.
"""

# Our option, names of TRL and transformers for it, and names elsewhere. All take the same value, in the same unit.
# Sections of ours may be left out; of the rows that have a name, the first whose option the command has is meant.
SAME: tuple[tuple[str, str, str], ...] = (
    # length of training
    ("epochs", "num_train_epochs", "num_epochs total_epochs"),
    ("max_steps", "", "steps num_steps total_steps num_rollout"),
    # batches
    ("batch_size", "", "train_batch_size"),
    ("prompts_per_step", "", "train_batch_size rollout_batch_size"),
    ("tokens_per_microbatch", "", "max_tokens_per_gpu"),
    ("group_size", "num_generations", "rollouts_per_example n_samples_per_prompt"),
    ("epochs_per_batch", "num_iterations", "num_ppo_epochs"),
    ("updates_per_batch", "", "num_mini_batches"),
    # optimizer and schedule
    ("optimizer.lr", "learning_rate", "lr"),
    ("optimizer.eps", "adam_epsilon", ""),
    ("optimizer.max_grad_norm", "", "grad_clip gradient_clip_val clip_grad"),
    ("scheduler.type", "", "lr_scheduler_type lr_scheduler lr_decay_style"),
    ("scheduler.warmup_steps", "", "warmup_ratio lr_warmup_iters"),
    # lengths and sampling
    ("seq_len", "max_length max_seq_length", "max_seq_len max_model_len"),
    ("data.max_prompt_len", "max_prompt_length", ""),
    ("sampling.max_tokens", "max_completion_length", "max_response_length max_new_tokens max_tokens"),
    ("sampling.max_tokens", "", "rollout_max_response_len"),
    ("sampling.temperature", "temperature", "rollout_temperature"),
    ("sampling.top_p", "top_p", "rollout_top_p"),
    ("sampling.top_k", "top_k", "rollout_top_k"),
    ("sampling.min_p", "min_p", ""),
    ("max_staleness", "", "max_async_level async_level max_off_policy_steps"),
    # objectives
    ("loss.type", "", "loss_type algorithm"),
    ("loss.beta", "beta", ""),
    ("loss.kl.coef", "beta", "kl_coef kl_loss_coef"),
    ("loss.clip_high", "epsilon_high", "eps_clip_high"),
    ("loss.dual_clip", "delta", ""),
    ("loss.entropy_coef", "", "entropy_coeff"),
    ("loss.gamma", "simpo_gamma", ""),
    ("loss.sft_weight", "cpo_alpha", ""),
    ("loss.centering", "center_rewards_coefficient", ""),
    ("loss.label_smoothing", "", "label_smoothing_factor"),
    ("loss.kl.model", "", "ref_load ref_model"),
    ("loss.reference", "", "ref_model"),
    ("advantage.type", "", "adv_estimator advantage_estimator"),
    ("filters.truncated", "mask_truncated_completions", ""),
    # tasks
    ("env.id", "", "env_id"),
    ("env.args", "env_args", ""),
    ("env.reward", "reward_funcs", "rm_type custom_rm_path"),
    ("env", "", "environment"),
    # model
    ("model.name", "model_name_or_path", "model_name model_path hf_checkpoint"),
    ("model.chat_template", "chat_template_path", ""),
    ("model.dtype", "", "torch_dtype dtype precision"),
    ("lora.rank", "lora_r", "lora_rank r"),
    ("lora.alpha", "lora_alpha", ""),
    ("lora.dropout", "lora_dropout", ""),
    ("lora.targets", "lora_target_modules", "target_modules"),
    ("lora.rslora", "use_rslora", ""),
    # data
    ("data.path", "dataset_name", "dataset dataset_path train_file"),
    ("data.name", "dataset_config", ""),
    ("data.split", "dataset_train_split", ""),
    ("data.eval_split", "dataset_test_split", ""),
    ("data.eval_path", "", "validation_file"),
    ("data.streaming", "dataset_streaming", ""),
    ("data.shuffle", "shuffle_dataset", ""),
    ("seed", "data_seed", ""),
    ("deterministic", "full_determinism", ""),
    # the run
    ("checkpoint.every", "", "save_steps save_freq save_interval"),
    ("checkpoint.keep_last", "save_total_limit", ""),
    ("checkpoint", "", "ckpt"),
    ("eval.every", "", "eval_steps eval_interval"),
    ("eval.samples", "num_generations_eval", "eval.rollouts_per_example n_samples_per_eval_prompt"),
    ("resume", "", "resume_from_checkpoint resume_from"),
    ("clean", "", "overwrite_output_dir"),
    ("output_dir", "", "out_dir save_dir save"),
    ("metrics.project", "", "wandb_project project_name wandb.project"),
    ("metrics.run_name", "", "experiment_name wandb.name"),
    ("metrics.report_to", "", "wandb use_wandb"),
    ("metrics", "", "monitors monitor"),
    # where it runs
    ("gpus.trainer", "", "num_gpus trainer_gpu_ids num_train_gpus actor_num_gpus_per_node"),
    ("gpus.inference", "", "inference_gpu_ids num_infer_gpus rollout_num_gpus"),
    ("parallel.ranks", "", "num_gpus nproc_per_node"),
    ("parallel.strategy", "", "fsdp train_backend deepspeed"),
    ("parallel.compile", "torch_compile", ""),
    ("parallel.timeout_s", "ddp_timeout", ""),
    ("client.base_url", "", "vllm_server_base_url base_url"),
    ("inference.gpu_memory_utilization", "vllm_gpu_memory_utilization", ""),
)

_ON_NODES = "start torchrun on each node, or let SLURM or Ray do it (docs/scaling.md)"
_COMPLETIONS = "that counts completions, prompts_per_step counts prompts: give the completions of a step / group_size"
_WHOLE = "seq_len counts the tokens of prompt and completion together"
_IN_LEARN_ROLES = "only answers are learned here; data.learn_roles says which roles are"
_VLLM_FLAGS = (
    "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_size_local data_parallel_address "
    "data_parallel_rpc_port data_parallel_start_rank headless enforce_eager"
)
# Names elsewhere, an option that the command has to have, and how to say the same here: it takes another value.
CONVERTED: tuple[tuple[str, str, str], ...] = (
    # length of training and batches
    (
        "num_epochs num_train_epochs total_epochs",
        "sync_every",
        "max_steps counts steps: epochs × training prompts / prompts_per_step",
    ),
    ("batch_size generation_batch_size per_device_train_batch_size", "prompts_per_step", _COMPLETIONS),
    (
        "per_device_train_batch_size",
        "batch_size",
        "batch_size counts the rows of a step: rows per device × devices × gradient accumulation steps",
    ),
    (
        "micro_batch_size per_device_eval_batch_size",
        "tokens_per_microbatch",
        "tokens_per_microbatch counts tokens: rows × seq_len hold as many rows, and more where they are shorter",
    ),
    (
        "gradient_accumulation_steps",
        "tokens_per_microbatch",
        "micro-batches are counted by their tokens, and the step keeps its size: "
        "tokens_per_microbatch = tokens of a step / devices / accumulation steps",
    ),
    (
        "steps_per_generation",
        "updates_per_batch",
        "updates_per_batch counts optimizer steps: steps per generation / gradient accumulation steps",
    ),
    (
        "global_batch_size",
        "updates_per_batch",
        "updates_per_batch is the number of rollouts of a step / that",
    ),
    # optimizer and lengths
    ("adam_beta1 adam_beta2", "optimizer.betas", "that is one of two: optimizer.betas = [adam_beta1, adam_beta2]"),
    ("optim", "optimizer", "the optimizer is AdamW, with the options of the section optimizer"),
    ("max_prompt_length", "sync_every", _WHOLE),
    ("max_completion_length max_response_length", "data.max_prompt_len", _WHOLE),
    # objectives and tasks
    ("epsilon eps_clip cliprange", "loss.clip_low", "that is both loss.clip_low and loss.clip_high"),
    ("importance_sampling_level", "loss.correction", '"sequence" is loss.type = "gspo"; others have a ratio per token'),
    ("vllm_importance_sampling_correction", "loss.correction", "that is loss.correction.type, with .low and .high"),
    ("scale_rewards", "advantage.type", 'false is advantage.type = "dr_grpo": no division by the deviation'),
    ("precompute_ref_log_probs", "loss.reference", 'true is loss.reference = "precomputed"'),
    ("reference_free", "loss.reference", 'true is loss.reference = "none"'),
    ("reward_weights", "env.rewards", "each of env.rewards has its weight"),
    ("assistant_only_loss completion_only_loss", "data.learn_roles", _IN_LEARN_ROLES),
    ("prompt_data", "env", 'that is the environment "dataset": env.id = "dataset", env.args.path'),
    # model and run
    ("bf16", "model.dtype", 'true is model.dtype = "bfloat16"'),
    ("fp16", "model.dtype", 'half precision here is bfloat16: model.dtype = "bfloat16"'),
    ("use_peft", "lora.rank", "true is a rank: lora.rank = 16"),
    ("save_strategy", "checkpoint.every", 'steps is checkpoint.every, a number or a share of them; no is "None"'),
    (
        "eval_strategy evaluation_strategy",
        "eval.every",
        'steps is eval.every, a number or a share of them; no is "None"',
    ),
    # where it runs
    ("use_vllm", "inference.engine", 'true is inference.engine = "vllm"'),
    ("use_vllm", "engine", 'true is engine = "vllm"'),
    ("vllm_mode", "deployment", "deployment says who shares a GPU: split, shared or colocated"),
    ("colocate", "deployment", "that is deployment = 'colocated' (one process), or 'shared' (two, on one GPU)"),
    ("actor_num_nodes", "trainer", f"the trainer on several nodes: {_ON_NODES}"),
    ("num_nodes", "trainer", _ON_NODES),
    (
        "rollout_num_gpus_per_engine",
        "gpus",
        "GPUs of one copy of the model are vLLM's flag: inference.engine = 'vllm', vllm.flags.tensor-parallel-size = 2",
    ),
    ("vllm_tensor_parallel_size", "vllm", "that is inference.vllm.flags.tensor-parallel-size, with engine = 'vllm'"),
    (_VLLM_FLAGS, "vllm", "that is a flag of vLLM: `inference --engine vllm` takes it, as does inference.vllm.flags"),
    (
        "inference.parallel parallel",
        "vllm",
        "tp and dp are flags of vLLM: inference.vllm.flags.tensor-parallel-size and data-parallel-size, "
        "with engine = 'vllm'",
    ),
)

# Algorithms under another name.
ALIASES = {
    **dict.fromkeys(("reward_model", "rm"), "reward"),
    "sigmoid": "dpo",
    "kto_pair": "kto",
    "bco_pair": "bco",
    "drgrpo": "dr_grpo",
    "gkd": "distillation",
}
_LAYER = "lay examples/reverse_text/algorithms/{}.toml over your file"
_DAPO = f'DAPO is loss.type = "grpo" with clip_high = 0.28 and orchestrator.overlong: {_LAYER.format("dapo")}'
_REINFORCE_PP = f'REINFORCE++ is orchestrator.advantage.type = "reinforce_pp": {_LAYER.format("reinforce_pp")}'
_CRITIC = 'that is trainer.loss.type = "ppo" with advantage.type = "reward"'
# An option that chooses, and algorithms that are not a value of it.
ALGORITHMS: dict[str, dict[str, str]] = {
    "loss.type": {
        "dapo": _DAPO,
        "bnpo": 'that is loss.type = "grpo" with normalize = "tokens", the default',
        "dr_grpo": f'Dr. GRPO is orchestrator.advantage.type = "dr_grpo" and normalize: {_LAYER.format("dr_grpo")}',
        "reinforce_pp": _REINFORCE_PP,
        "reinforce_pp_baseline": 'that is orchestrator.advantage.type = "reinforce_pp_baseline"',
        "tis": f'that is loss.correction.type = "truncate": {_LAYER.format("off_policy")}',
        "icepop": 'that is loss.correction.type = "mask"',
        "distillation": f"distillation is loss.teacher: {_LAYER.format('distillation')}",
        "sft": "`sft` does that",
        "robust": 'that is loss.type = "dpo" with label_smoothing',
        **dict.fromkeys(
            ("dpo", "ipo", "kto", "bco", "orpo", "cpo", "simpo", "reward"),
            "that is an objective on preferences: `align` has it",
        ),
        **dict.fromkeys(("grpo", "gspo", "rloo", "cispo", "reinforce", "ppo"), "that learns from rewards: `rl` has it"),
    },
    "advantage.type": {
        "dapo": _DAPO,
        "gae": _CRITIC,
        "ppo": _CRITIC,
        "gspo": 'that is trainer.loss.type = "gspo"',
        "cispo": 'that is trainer.loss.type = "cispo"',
    },
}
