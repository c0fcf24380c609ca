"""What people type who come from elsewhere, and what it is called here. Every name leads to an option of the command
that was called, or is left out: the same table serves all of them."""

from collections.abc import Sequence

PROCESSES = ("trainer", "orchestrator", "inference")  # of `rl`, whose sections are the commands of these names

# Names of TRL, transformers, PEFT and others → our options, the first that the command has. They take the same value; a
# name that counts something else is explained below. One with a section is of that section alone.
FOREIGN: dict[str, tuple[str, ...]] = {
    # length of training
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "total_epochs": ("epochs",),
    "steps": ("max_steps",),
    "num_steps": ("max_steps",),
    "total_steps": ("max_steps",),
    "num_rollout": ("max_steps",),
    # batches
    "train_batch_size": ("batch_size", "prompts_per_step"),
    "max_tokens_per_gpu": ("tokens_per_microbatch",),
    "num_generations": ("group_size",),
    "rollouts_per_example": ("group_size",),
    "eval.rollouts_per_example": ("eval.samples",),
    "num_iterations": ("epochs_per_batch",),
    "num_ppo_epochs": ("epochs_per_batch",),
    "num_mini_batches": ("updates_per_batch",),
    # optimizer and schedule
    "lr": ("optimizer.lr",),
    "learning_rate": ("optimizer.lr",),
    "adam_beta1": ("optimizer.betas",),
    "adam_beta2": ("optimizer.betas",),
    "adam_epsilon": ("optimizer.eps",),
    "grad_clip": ("optimizer.max_grad_norm",),
    "gradient_clip_val": ("optimizer.max_grad_norm",),
    "clip_grad": ("optimizer.max_grad_norm",),
    "lr_scheduler_type": ("scheduler.type",),
    "lr_scheduler": ("scheduler.type",),
    "lr_decay_style": ("scheduler.type",),
    "warmup_ratio": ("scheduler.warmup_steps",),
    "lr_warmup_iters": ("scheduler.warmup_steps",),
    "optim": ("optimizer",),
    # lengths and sampling
    "max_length": ("seq_len",),
    "max_seq_length": ("seq_len",),
    "max_seq_len": ("seq_len",),
    "max_model_len": ("seq_len",),
    "max_prompt_length": ("data.max_prompt_len",),
    "max_completion_length": ("sampling.max_tokens",),
    "max_response_length": ("sampling.max_tokens",),
    "max_new_tokens": ("sampling.max_tokens",),
    "max_tokens": ("sampling.max_tokens",),
    "temperature": ("sampling.temperature",),
    "top_p": ("sampling.top_p",),
    "top_k": ("sampling.top_k",),
    "min_p": ("sampling.min_p",),
    "rollout_temperature": ("sampling.temperature",),
    "rollout_top_p": ("sampling.top_p",),
    "rollout_top_k": ("sampling.top_k",),
    "rollout_max_response_len": ("sampling.max_tokens",),
    "max_async_level": ("max_staleness",),
    "async_level": ("max_staleness",),
    "max_off_policy_steps": ("max_staleness",),
    # objectives
    "loss_type": ("loss.type",),
    "algorithm": ("loss.type",),
    "beta": ("loss.beta", "loss.kl.coef"),
    "kl_coef": ("loss.kl.coef",),
    "kl_loss_coef": ("loss.kl.coef",),
    "epsilon_high": ("loss.clip_high",),
    "eps_clip_high": ("loss.clip_high",),
    "delta": ("loss.dual_clip",),
    "scale_rewards": ("advantage.type",),
    "adv_estimator": ("advantage.type",),
    "advantage_estimator": ("advantage.type",),
    "importance_sampling_level": ("loss.type",),
    "vllm_importance_sampling_correction": ("loss.correction.type",),
    "simpo_gamma": ("loss.gamma",),
    "label_smoothing_factor": ("loss.label_smoothing",),
    "precompute_ref_log_probs": ("loss.reference",),
    "reference_free": ("loss.reference",),
    "ref_load": ("loss.kl.model",),
    "ref_model": ("loss.kl.model", "loss.reference"),
    "entropy_coeff": ("loss.entropy_coef",),
    "reward_funcs": ("env.reward",),
    "rm_type": ("env.reward",),
    "custom_rm_path": ("env.reward",),
    "env_id": ("env.id",),
    "env": ("orchestrator.env",),
    "environment": ("env",),
    # model and data
    "model_name_or_path": ("model.name",),
    "model_name": ("model.name",),
    "model_path": ("model.name",),
    "chat_template_path": ("model.chat_template",),
    "torch_dtype": ("model.dtype",),
    "dtype": ("model.dtype",),
    "precision": ("model.dtype",),
    "bf16": ("model.dtype",),
    "fp16": ("model.dtype",),
    "dataset": ("data.path",),
    "dataset_name": ("data.path",),
    "dataset_path": ("data.path",),
    "train_file": ("data.path",),
    "dataset_config": ("data.name",),
    "dataset_train_split": ("data.split",),
    "dataset_test_split": ("data.eval_split",),
    "validation_file": ("data.eval_path",),
    "dataset_streaming": ("data.streaming",),
    "assistant_only_loss": ("data.learn_roles",),
    "completion_only_loss": ("data.learn_roles",),
    "data_seed": ("seed",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "r": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_dropout": ("lora.dropout",),
    "lora_target_modules": ("lora.targets",),
    "target_modules": ("lora.targets",),
    "use_rslora": ("lora.rslora",),
    "use_peft": ("lora.rank",),
    # the run
    "save_steps": ("checkpoint.every",),
    "save_strategy": ("checkpoint.every",),
    "save_freq": ("checkpoint.every",),
    "save_interval": ("checkpoint.every",),
    "ckpt": ("checkpoint",),
    "save_total_limit": ("checkpoint.keep_last",),
    "eval_steps": ("eval.every",),
    "eval_interval": ("eval.every",),
    "n_samples_per_eval_prompt": ("eval.samples",),
    "eval_strategy": ("eval.every",),
    "evaluation_strategy": ("eval.every",),
    "resume_from_checkpoint": ("resume",),
    "resume_from": ("resume",),
    "overwrite_output_dir": ("clean",),
    "out_dir": ("output_dir",),
    "save_dir": ("output_dir",),
    "save": ("output_dir",),
    "wandb_project": ("metrics.project",),
    "project_name": ("metrics.project",),
    "experiment_name": ("metrics.run_name",),
    "wandb": ("metrics.report_to",),
    "wandb.name": ("metrics.run_name",),
    "wandb.project": ("metrics.project",),
    "use_wandb": ("metrics.report_to",),
    "monitors": ("metrics",),
    "monitor": ("metrics",),
    "num_gpus": ("gpus.trainer", "parallel.ranks"),
    "trainer_gpu_ids": ("gpus.trainer",),
    "inference_gpu_ids": ("gpus.inference",),
    "num_train_gpus": ("gpus.trainer",),
    "num_infer_gpus": ("gpus.inference",),
    "actor_num_gpus_per_node": ("gpus.trainer",),
    "rollout_num_gpus": ("gpus.inference",),
    "nproc_per_node": ("parallel.ranks",),
    "fsdp": ("parallel.strategy",),
    "train_backend": ("parallel.strategy",),
    "deepspeed": ("parallel.strategy",),
    "torch_compile": ("parallel.compile",),
    "use_vllm": ("inference.engine", "engine"),
    "vllm_mode": ("inference.engine",),
    "vllm_server_base_url": ("client.base_url",),
    "base_url": ("client.base_url",),
}

# Another's name, by its place where it is ours in another place → what it comes to here, by an option that the command
# has to have.
_ON_NODES = "start torchrun on each node, or let SLURM or Ray do it (docs/scaling.md)"
_PER_COPY = (
    "GPUs of one copy of the model are vLLM's flag: inference.engine = 'vllm', vllm.flags.tensor-parallel-size = 2"
)
_OF_VLLM = "that is a flag of vLLM: `inference --engine vllm` takes it, as does inference.vllm.flags"
_VLLM_FLAGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local"),
    *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_start_rank", "headless", "enforce_eager"),
)
_TP_AND_DP = "inference.vllm.flags.tensor-parallel-size and data-parallel-size, with engine = 'vllm'"
_ROLLOUTS = "that counts completions, prompts_per_step counts prompts: give the completions of a step / group_size"
_PER_DEVICE = "batch_size counts the rows of a step: rows per device × devices × gradient accumulation steps"
_EPOCHS = "max_steps counts steps: epochs × training prompts / prompts_per_step"
_ROWS = "tokens_per_microbatch counts tokens: rows × seq_len hold as many rows, and more where they are shorter"
_ACCUMULATION = (
    "micro-batches are counted by their tokens, and the step keeps its size: "
    "tokens_per_microbatch = tokens of a step / devices / accumulation steps"
)
_UPDATES = "updates_per_batch counts optimizer steps: steps per generation / gradient accumulation steps"
_WHOLE = "seq_len counts the tokens of prompt and completion together"
_BOTH_CLIPS = "that is both loss.clip_low and loss.clip_high"
EXPLAINED: dict[str, dict[str, str]] = {
    **{key: {"vllm": _OF_VLLM} for key in _VLLM_FLAGS},
    **{key: {"vllm": f"tp and dp are flags of vLLM: {_TP_AND_DP}"} for key in ("inference.parallel", "parallel")},
    **{key: {"prompts_per_step": _ROLLOUTS} for key in ("batch_size", "generation_batch_size")},
    "per_device_train_batch_size": {"prompts_per_step": _ROLLOUTS, "batch_size": _PER_DEVICE},
    **{key: {"sync_every": _EPOCHS} for key in ("num_epochs", "num_train_epochs", "total_epochs")},
    **{key: {"tokens_per_microbatch": _ROWS} for key in ("micro_batch_size", "per_device_eval_batch_size")},
    "gradient_accumulation_steps": {"tokens_per_microbatch": _ACCUMULATION},
    "steps_per_generation": {"updates_per_batch": _UPDATES},
    "max_prompt_length": {"sync_every": _WHOLE},
    **{key: {"data.max_prompt_len": _WHOLE} for key in ("max_completion_length", "max_response_length")},
    "global_batch_size": {"updates_per_batch": "updates_per_batch is the number of rollouts of a step / that"},
    **{key: {"loss.clip_low": _BOTH_CLIPS} for key in ("epsilon", "eps_clip", "cliprange")},
    "prompt_data": {"env": 'that is the environment "dataset": env.id = "dataset", env.args.path'},
    "colocate": {"deployment": "that is deployment = 'colocated' (one process), or 'shared' (two, on one GPU)"},
    "actor_num_nodes": {"trainer": f"the trainer on several nodes: {_ON_NODES}"},
    "num_nodes": {"trainer": _ON_NODES},
    "rollout_num_gpus_per_engine": {"gpus": _PER_COPY},
    "hf_checkpoint": {"gpus": "that is model.name"},
    "rollout_batch_size": {"gpus": "that is orchestrator.prompts_per_step"},
    "n_samples_per_prompt": {"gpus": "that is orchestrator.group_size"},
}

_LAYER = "lay examples/reverse_text/algorithms/{}.toml over your file"
# Algorithms that are not a value of the option they are given to.
_DAPO = f'DAPO is loss.type = "grpo" with clip_high = 0.28 and orchestrator.overlong: {_LAYER.format("dapo")}'
_REINFORCE_PP = f'REINFORCE++ is orchestrator.advantage.type = "reinforce_pp": {_LAYER.format("reinforce_pp")}'
_TEACHER = f"distillation is loss.teacher: {_LAYER.format('distillation')}"
_IN_ALIGN = "that is an objective on preferences: `align` has it"
_IN_RL = "that learns from rewards: `rl` has it"
ALGORITHMS: dict[str, dict[str, str]] = {
    "loss.type": {
        "dapo": _DAPO,
        "bnpo": 'that is loss.type = "grpo" with normalize = "tokens", the default',
        "dr_grpo": f'Dr. GRPO is orchestrator.advantage.type = "dr_grpo" and normalize: {_LAYER.format("dr_grpo")}',
        "reinforce_pp": _REINFORCE_PP,
        "reinforce_pp_baseline": 'that is orchestrator.advantage.type = "reinforce_pp_baseline"',
        "tis": f'that is loss.correction.type = "truncate": {_LAYER.format("off_policy")}',
        "icepop": 'that is loss.correction.type = "mask"',
        "distillation": _TEACHER,
        "gkd": _TEACHER,
        "sft": "`sft` does that",
        "sigmoid": 'that is loss.type = "dpo"',
        "robust": 'that is loss.type = "dpo" with label_smoothing',
        "kto_pair": 'that is loss.type = "kto"',
        "bco_pair": 'that is loss.type = "bco"',
        "reward_model": 'that is loss.type = "reward"',
        **dict.fromkeys(("dpo", "ipo", "kto", "bco", "orpo", "cpo", "simpo"), _IN_ALIGN),
        **dict.fromkeys(("grpo", "gspo", "rloo", "cispo", "reinforce", "ppo"), _IN_RL),
    },
    "advantage.type": {
        "dapo": _DAPO,
        "gae": 'that is trainer.loss.type = "ppo" with advantage.type = "reward"',
        "ppo": 'that is trainer.loss.type = "ppo" with advantage.type = "reward"',
        "gspo": 'that is trainer.loss.type = "gspo"',
        "cispo": 'that is trainer.loss.type = "cispo"',
    },
}


def algorithm_hint(key: str, value: object) -> str:
    """What an algorithm's name means where it is no value of the option `key`; empty: nothing is known of it."""
    name = str(value).lower().replace("-", "_").replace("++", "_pp").replace("plus_plus", "pp")
    for option, algorithms in ALGORITHMS.items():
        if key == option or key.endswith(f".{option}"):
            return algorithms.get(name, "")
    return ""


def explanation(name: str, paths: Sequence[str]) -> str:
    """What to do instead, for a name that is no option of ours but whose purpose is known; empty: it is not."""
    told = EXPLAINED.get(name.lower(), {})
    return next((text for option, text in told.items() if _ending_with(option, paths)), "")


def options_meant(path: str, paths: Sequence[str]) -> list[str]:
    """The options, out of all that the command has, that an unknown key may mean: by another's name for it, unless that
    could be anything, or because it stands in the wrong place."""
    return options_named(path, paths) or _misplaced(path, paths)


def options_named(path: str, paths: Sequence[str]) -> list[str]:
    """By another's name for them; the name with its sections first."""
    parts = path.lower().split(".")
    names = [".".join(parts[start:]) for start in range(len(parts))]
    for meant in next((FOREIGN[name] for name in names if name in FOREIGN), ()):
        found = _ending_with(meant, paths)
        nearest = min((path.count(".") for path in found), default=0)
        found = [path for path in found if path.count(".") == nearest]
        if 1 <= len(found) <= 2:
            return found
    return []


def _misplaced(path: str, paths: Sequence[str]) -> list[str]:
    """Those of the same name that only need sections added or left out, or are another process's: trainer.group_size is
    orchestrator.group_size, while trainer.scheduler.name is not model.name."""
    name = path.rpartition(".")[2]
    same = [other for other in paths if other.rpartition(".")[2] == name]
    return _without_echoes([other for other in same if _is_elsewhere(path, other)])


def _is_elsewhere(path: str, other: str) -> bool:
    places = path.partition("."), other.partition(".")
    is_of_another = places[0][2] == places[1][2] and all(process in PROCESSES for process, _, _ in places)
    return is_of_another or _is_within(path, other) or _is_within(other, path)


def _is_within(path: str, other: str) -> bool:
    """Whether `other` has the parts of `path` in their order, and maybe more in between."""
    parts = iter(other.split("."))
    return all(part in parts for part in path.split("."))


def _ending_with(name: str, paths: Sequence[str]) -> list[str]:
    """The options of this name, once each."""
    return _without_echoes([path for path in paths if path == name or path.endswith(f".{name}")])


def _without_echoes(paths: Sequence[str]) -> list[str]:
    """An option that processes share is an option of each of them too."""
    found = dict.fromkeys(paths)
    return [path for path in found if not any(path.endswith(f".{other}") for other in found)]
