"""Names of transformers' TrainingArguments and TRL's configs: what each is here, or why it is refused.

Paths are those of `sft` and `align`; `placed` says where the same option is under `rl`.
"""

from collections.abc import Mapping
from typing import Any

# Sections of `rl` that have the options of `sft` and `align`.
OF_TRAINER = ("optimizer", "scheduler", "parallel", "lora", "tokens_per_microbatch", "loss", "device")
OF_TRAINER += ("updates_per_batch", "epochs_per_batch")
OF_ORCHESTRATOR = ("sampling", "eval", "metrics", "group_size", "prompts_per_step", "env", "advantage", "filters")

# Taken as they are: another name for one of our options.
RENAMED: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "seed": "seed",
    "data_seed": "seed",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "log_level": "log_level",
    "run_name": "metrics.run_name",
    "project": "metrics.project",
    "save_total_limit": "checkpoint.keep_last",
    "ddp_timeout": "parallel.timeout_s",
    "torch_compile": "parallel.compile",
    "full_determinism": "deterministic",
    "model_name_or_path": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_path": "model.chat_template",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "use_rslora": "lora.rslora",
}
RENAMED_OFFLINE: Mapping[str, str] = {
    "num_train_epochs": "epochs",
    "beta": "loss.beta",
    "label_smoothing": "loss.label_smoothing",
    "desirable_weight": "loss.desirable_weight",
    "undesirable_weight": "loss.undesirable_weight",
    "simpo_gamma": "loss.gamma",
    "cpo_alpha": "loss.sft_weight",
    "center_rewards_coefficient": "loss.centering",
    "max_prompt_length": "data.max_prompt_len",
    "dataset_name": "data.path",
    "dataset_config": "data.name",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "dataset_streaming": "data.streaming",
    "shuffle_dataset": "data.shuffle",
    "eval_size": "data.eval_size",
}
RENAMED_ONLINE: Mapping[str, str] = {
    "beta": "loss.kl.coef",
    "num_generations": "group_size",
    "max_completion_length": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "entropy_coef": "loss.entropy_coef",
    "num_iterations": "epochs_per_batch",
    "steps_per_generation": "updates_per_batch",
    "env": "env.id",
    "env_args": "env.args",
    "reward_funcs": "env.reward",
    "mask_truncated_completions": "filters.truncated",
    "num_generations_eval": "eval.samples",
    "vllm_gpu_memory_utilization": "inference.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference.vllm.flags.tensor-parallel-size",
}

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

_HUB = "the model stays on this file system, in weights/latest; upload it from there"
_SHARDING = "use execution.distributed_config: DDP, DSZero2, DSZero3, DSZero3Offload or FSDP"
_NOT_HERE = "there is no such thing here; leave it out"
_CORRECTION = "use trainer.loss.correction.type, .low and .high"
_SERVER = "a server of the run's own generates: use use_vllm, or inference.engine"
_COMPILE = "torch_compile: true uses torch's defaults; leave it out"
REFUSED: Mapping[str, str] = {
    "output_dir": "each run has its own folder below execution.output_dir; leave it out",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config"), _SHARDING),
    **dict.fromkeys(("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"), _HUB),
    **dict.fromkeys(("hub_revision", "log_completions_hub_repo"), _HUB),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "trackio stays on this machine"
    ),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), _COMPILE),
    **dict.fromkeys(
        ("metric_for_best_model", "greater_is_better"), "no best model is chosen; results.csv compares runs"
    ),
    "resume_from_checkpoint": "`sweep --resume` continues what failed from the newest checkpoint",
    "overwrite_output_dir": "runs are continued, never overwritten; use another execution.output_dir",
    "importance_sampling_level": "execution.algorithm: gspo has one ratio per sequence",
    "scale_rewards": "execution.algorithm: dr_grpo does not divide by the standard deviation",
    "vllm_importance_sampling_correction": _CORRECTION,
    "reference_free": "use loss.reference: none",
    "generation_batch_size": "use per_device_train_batch_size and gradient_accumulation_steps",
    "reward_weights": "use orchestrator.env.rewards, each with its weight",
    "model_revision": "give the directory of that revision as model_name_or_path",
    "repetition_penalty": "rollouts would be off-policy",
    "lora_task_type": "adapters are of language models",
    **dict.fromkeys(
        ("neftune_noise_alpha", "optim_args", "optim_target_modules", "include_for_metrics", "label_names", "debug"),
        _NOT_HERE,
    ),
    **dict.fromkeys(("lora_target_parameters", "lora_modules_to_save", "model_init_kwargs"), _NOT_HERE),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), "models are not quantized"
    ),
    **dict.fromkeys(("router_aux_loss_coef", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"), _NOT_HERE),
    **dict.fromkeys(("loss_weights", "use_weighting", "discopop_tau", "eos_token", "dataset_kwargs"), _NOT_HERE),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps", "ignore_bias_buffers"), _NOT_HERE),
    **dict.fromkeys(
        ("chat_template_kwargs", "is_encoder_decoder", "log_multimodal", "cast_lm_head_to_fp32"), _NOT_HERE
    ),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos", "top_entropy_quantile"), _NOT_HERE),
    **dict.fromkeys(("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"), _NOT_HERE),
    **dict.fromkeys(("use_bias_correction_kl", "reward_clip_range", "alpha"), _NOT_HERE),
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
        "the entropy bonus is constant: use entropy_coef",
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "off_policy_mask_threshold"), _CORRECTION
    ),
    **dict.fromkeys(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), _CORRECTION),
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"), _SERVER),
    **dict.fromkeys(("vllm_group_port", "vllm_model_impl", "cache_implementation"), _SERVER),
    **dict.fromkeys(("use_transformers_paged", "use_transformers_continuous_batching"), _SERVER),
    "transformers_continuous_batching_config": _SERVER,
    **dict.fromkeys(
        ("vllm_mode", "vllm_enable_sleep_mode"), "use deployment: split, shared or colocated says who shares a GPU"
    ),
    "vllm_max_model_length": "use max_prompt_length and max_completion_length",
    "vllm_structured_outputs_regex": "rollouts would be off-policy",
    "generation_kwargs": "use temperature, top_p, top_k, min_p and max_completion_length",
    "generate_during_eval": "use the section `evaluation`",
    "max_tool_calling_iterations": "an environment says how many turns it has: use env_args",
    "multi_objective_aggregation": "use orchestrator.env.rewards: their weighted sum is learned from",
    "normalize_advantages": "the algorithm says it: use execution.algorithm",
}

# Names that need more than another name: launch/sweep/rules.py.
BY_RULE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs"),
    *("bf16", "torch_dtype", "dtype", "gradient_checkpointing", "activation_checkpointing", "eval_strategy"),
    *("evaluation_strategy", "eval_steps"),
    *("save_strategy", "report_to", "use_cpu", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "precompute_ref_log_probs", "max_prompt_length"),
    *("config", "dataset_name", "use_peft", "use_vllm", "max_grad_norm", "save_steps", "loss_type", "epsilon"),
)


def renamed(online: bool) -> dict[str, str]:
    return {**RENAMED, **(RENAMED_ONLINE if online else RENAMED_OFFLINE)}


def placed(path: str, online: bool) -> str:
    """Where an option of `sft` and `align` is under `rl`."""
    head = path.partition(".")[0]
    if online and head in OF_TRAINER:
        return f"trainer.{path}"
    if online and head in OF_ORCHESTRATOR:
        return f"orchestrator.{path}"
    return path


def all_names() -> set[str]:
    return {
        *RENAMED,
        *RENAMED_OFFLINE,
        *RENAMED_ONLINE,
        *IMMATERIAL,
        *ONLY,
        *REFUSED,
        *BY_RULE,
    }
