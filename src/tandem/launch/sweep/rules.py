"""TrainingArguments that are more than another name for one of our options: values are turned into ours, or computed
from several of them. Each rule reads what was given by name and sets options; what it refuses, it refuses by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.full_names import find_option
from tandem.config.sampling import SamplingConfig
from tandem.config.shared import num_steps
from tandem.config.sources import Tree
from tandem.launch.sweep.algorithms import CONFIGS
from tandem.utils.secrets import names_secret

DEFAULT_BATCH_SIZE = 8  # of transformers, for one device
DEFAULT_GROUP = OrchestratorConfig.model_fields["group_size"].default
DEFAULT_COMPLETION = SamplingConfig.model_fields["max_tokens"].default
HELD_OUT = 0.05
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
TRACKERS = ("tensorboard", "wandb", "trackio")
# What the rules compute with: a mistake in these would not reach the options that are checked later.
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_prompt_length")
NO_LIMIT = -1  # max_steps of transformers where epochs count: as if it was left out
NUMBERS = ("num_train_epochs", "eval_steps", "save_steps", "warmup_ratio", "warmup_steps")
NUMBERS += ("adam_beta1", "adam_beta2", "max_grad_norm")
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # transformers' name until 5.22, and since
SWITCHES = ("bf16", "use_cpu", "use_peft", "use_vllm", "precompute_ref_log_probs", *CHECKPOINTING)


# Of online algorithms: rules that only name an option.
NAMED_ONLINE = {
    "env": "env.id",
    "steps_per_generation": "updates_per_batch",
    "vllm_tensor_parallel_size": "inference.vllm.flags.tensor-parallel-size",
}
# What the rules read.
BY_RULE = {
    *COUNTS,
    *NUMBERS,
    *SWITCHES,
    *("max_steps", "torch_dtype", "dtype", "eval_strategy", "evaluation_strategy", "save_strategy", "report_to"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "loss_type", "dataset_name"),
}
BY_RULE_ONLINE = {*BY_RULE, "epsilon", *NAMED_ONLINE}


class Refused(ValueError):
    """A value of the experiment file, by its key."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass
class Options:
    """Options of ours by dotted path, each with the key of the experiment file that it comes from."""

    command: str  # rl, sft or align
    base: Tree = field(default_factory=dict)  # a tree of what holds where nothing is set
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def online(self) -> bool:
        return self.command == "rl"

    def set(self, path: str, value: Any, key: str) -> None:
        """An option by its name, which may lack its beginning; a table is so many options."""
        path = self._placed(path)
        for option, given in _leaves(path, value).items():
            if option in self.values and (before := self.values[option]) != given:
                other = self.sources[option]
                told = "" if names_secret(option) else f", to {given!r} and {before!r}"
                raise Refused(key, f"{key} and {other} both set {option}{told}; give one")
            self.values[option], self.sources[option] = given, key

    def compute(self, path: str, value: Any, why: str) -> None:
        """A value that was left out."""
        if self.get(path) is None:
            path = self._placed(path)
            self.values[path], self.sources[path] = value, why
            self.notes.append(f"{path} = {value}: {why}")

    def get(self, path: str) -> Any:
        """As set, or as the algorithm and the files that the experiment builds on have it."""
        path = self._placed(path)
        return self.values[path] if path in self.values else value_at(self.base, path)

    def _placed(self, path: str) -> str:
        return find_option(CONFIGS[self.command], path) or path


def _leaves(path: str, value: Any) -> dict[str, Any]:
    """Values by dotted path. A table whose keys have dots themselves stays whole."""
    if not isinstance(value, Mapping) or not value or any("." in key for key in value):
        return {path: value}
    return {leaf: inner for key in value for leaf, inner in _leaves(f"{path}.{key}", value[key]).items()}


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """None where there is none."""
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def apply_rules(given: Mapping[str, Any], options: Options, world_size: int, *, paired: bool) -> None:
    """All rules, for the arguments that were given."""
    for key, value in given.items():
        _refuse_wrong_type(key, value)
    _dataset(given, options)
    _length(given, options)
    _precision(given, options)
    _optimizer(given, options)
    _evaluation(given, options)
    _checkpoints(given, options)
    _adapter(given, options)
    if "epsilon" in given:
        options.set("loss.clip_low", given["epsilon"], "epsilon")
        options.compute("loss.clip_high", given["epsilon"], "epsilon, as there is no epsilon_high")
    for name, option in NAMED_ONLINE.items():
        if name in given:
            options.set(option, given[name], name)
    if "report_to" in given:
        options.set("metrics.report_to", _trackers(given["report_to"]), "report_to")
    if given.get("use_cpu"):
        options.set("trainer.device" if options.online else "device", "cpu", "use_cpu")
    if given.get("use_vllm") is not None:
        if not options.online:
            raise Refused("use_vllm", "use_vllm is for online algorithms, which generate; leave it out")
        options.set("inference.engine", "vllm" if given["use_vllm"] else "native", "use_vllm")
    for name in CHECKPOINTING:
        if given.get(name) is not None:
            options.set("parallel.gradient_checkpointing", int(given[name]), name)
    if not options.online and "precompute_ref_log_probs" in given:
        source = "precomputed" if given["precompute_ref_log_probs"] else "model"
        options.set("loss.reference", source, "precompute_ref_log_probs")
    _batch(given, options, world_size, paired)


def _refuse_wrong_type(key: str, value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if key in COUNTS and not (is_whole and value >= 1):
        raise Refused(key, f"{key} = {value!r} is not a count; give a whole number from 1 on")
    if key == "max_steps" and not (is_whole and value >= 1):
        told = "is not a whole number from 1 on; give one, or -1 and num_train_epochs"
        raise Refused(key, f"{key} = {value!r} {told}")
    if key in NUMBERS and not (is_whole or isinstance(value, float)):
        raise Refused(key, f"{key} = {value!r} is not a number")
    if key in SWITCHES and not isinstance(value, bool | int):
        raise Refused(key, f"{key} = {value!r} is neither true nor false")
    if key == "lr_scheduler_kwargs" and not isinstance(value, Mapping):
        raise Refused(key, f"{key} = {value!r} is not a table; give {{min_lr_rate: 0.1}}")


def _dataset(given: Mapping[str, Any], options: Options) -> None:
    """Online, rows are the tasks of an environment."""
    if "dataset_name" not in given:
        return
    if options.online:
        options.set("env.id", "dataset", "dataset_name")
    options.set("env.args.path" if options.online else "data.path", given["dataset_name"], "dataset_name")


def _length(given: Mapping[str, Any], options: Options) -> None:
    if "num_train_epochs" in given and not options.online:
        options.set("epochs", given["num_train_epochs"], "num_train_epochs")
    if "max_steps" in given:
        options.set("max_steps", given["max_steps"], "max_steps")
        # transformers lets max_steps win over num_train_epochs.
        options.values.pop("epochs", None)
    if options.online and "num_train_epochs" in given and "max_steps" not in given:
        raise Refused(
            "num_train_epochs", "num_train_epochs counts passes over rows, and `rl` counts steps; give max_steps"
        )
    if "max_prompt_length" in given and options.online:
        completion = options.get("sampling.max_tokens") or DEFAULT_COMPLETION
        options.set("seq_len", given["max_prompt_length"] + completion, "max_prompt_length")
    elif "max_prompt_length" in given:
        options.set("data.max_prompt_len", given["max_prompt_length"], "max_prompt_length")
    if not options.online and {"seq_len", "data.max_prompt_len"} & options.values.keys():
        options.compute("data.on_bad_row", "truncate", "transformers cuts rows that are too long")


def _precision(given: Mapping[str, Any], options: Options) -> None:
    for name in ("torch_dtype", "dtype"):
        if given.get(name, "auto") not in ("bfloat16", "float32", "auto"):
            raise Refused(name, f"{name} = {given[name]!r} is not supported; give bfloat16 or float32")
    for name in ("bf16", "torch_dtype", "dtype"):
        if given.get(name) not in (None, False, "float32", "auto"):
            options.set("model.dtype", "bfloat16", name)


def _optimizer(given: Mapping[str, Any], options: Options) -> None:
    if "adam_beta1" in given or "adam_beta2" in given:
        betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
        options.set("optimizer.betas", betas, "adam_beta1" if "adam_beta1" in given else "adam_beta2")
    if "max_grad_norm" in given:
        # In transformers, 0 is no clipping.
        options.set("optimizer.max_grad_norm", given["max_grad_norm"] or math.inf, "max_grad_norm")
    # transformers decays the learning rate linearly unless it is told otherwise.
    kind = given.get("lr_scheduler_type", "linear")
    if kind == "cosine_with_min_lr":
        kind = "cosine"
    if kind not in SCHEDULES:
        raise Refused("lr_scheduler_type", f"lr_scheduler_type = {kind!r} is not here; valid: {', '.join(SCHEDULES)}")
    if "lr_scheduler_type" in given:
        options.set("scheduler.type", SCHEDULES[kind], "lr_scheduler_type")
    else:
        options.compute("scheduler.type", "linear", "the default of transformers")
    for name, value in (given.get("lr_scheduler_kwargs") or {}).items():
        if name != "min_lr_rate":
            raise Refused("lr_scheduler_kwargs", f"lr_scheduler_kwargs.{name} is not here; valid: min_lr_rate")
        options.set("scheduler.min_lr_ratio", value, "lr_scheduler_kwargs")
    _warmup(given, options)


def _warmup(given: Mapping[str, Any], options: Options) -> None:
    """A share of training is an option of ours as well. Zero of the one leaves it to the other."""
    ratio, steps = given.get("warmup_ratio"), given.get("warmup_steps")
    if ratio is not None and not 0 <= ratio < 1:
        raise Refused("warmup_ratio", f"warmup_ratio = {ratio} is not a share of training; give 0 or more, below 1")
    if ratio is not None and (ratio or not steps):
        options.set("scheduler.warmup_steps", ratio, "warmup_ratio")
    if steps is not None and (steps or not ratio):
        options.set("scheduler.warmup_steps", steps, "warmup_steps")


def _evaluation(given: Mapping[str, Any], options: Options) -> None:
    key = "eval_strategy" if "eval_strategy" in given else "evaluation_strategy"
    strategy = given.get(key, "steps" if "eval_steps" in given else "no")
    strategy = "no" if strategy is False else strategy  # YAML reads a bare `no` as false
    if strategy not in ("no", "steps"):
        hint = "give eval_strategy: steps and eval_steps, as a number of steps or a fraction of training"
        raise Refused(key, f"{key} = {strategy!r} is not here; {hint}")
    if strategy == "no":
        return
    if "eval_steps" not in given:
        raise Refused(key, f"{key}: steps needs eval_steps, a number of steps or a fraction of training")
    options.set("eval.every", _eval_steps(given["eval_steps"], options), "eval_steps")
    if not options.online and not {"data.eval_split", "data.eval_path"} & options.values.keys():
        options.compute("data.eval_size", HELD_OUT, "rows to evaluate on, as none were named")


def _eval_steps(value: float, options: Options) -> float:
    if not options.online or value >= 1:
        return value
    steps = options.get("max_steps")
    if steps is None:
        raise Refused("eval_steps", f"eval_steps = {value} is a share of max_steps, which is not given; give both")
    return num_steps(value, steps)


def _checkpoints(given: Mapping[str, Any], options: Options) -> None:
    strategy = given.get("save_strategy", "steps")
    if strategy in ("no", False):
        options.set("checkpoint.every", None, "save_strategy")
    elif strategy != "steps":
        raise Refused("save_strategy", f"save_strategy = {strategy!r} is not here; give steps and save_steps, or no")
    elif "save_steps" in given:
        options.set("checkpoint.every", given["save_steps"], "save_steps")


def _adapter(given: Mapping[str, Any], options: Options) -> None:
    """`use_peft: false` trains the whole model whatever else is said of LoRA, so that it may be one of two values."""
    paths = [path for path in options.values if path.startswith(("lora.", "trainer.lora."))]
    if given.get("use_peft") is False:
        for path in paths:
            del options.values[path]
    elif given.get("use_peft") and not paths:
        options.set("lora.rank", 16, "use_peft")


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if names == ["none"]:
        return []
    for name in names:
        if name not in TRACKERS:
            raise Refused("report_to", f"report_to = {name!r} is not here; valid: {', '.join(TRACKERS)}, none")
    return names


def _batch(given: Mapping[str, Any], options: Options, world_size: int, paired: bool) -> None:
    per_device, accumulated = given.get("per_device_train_batch_size"), given.get("gradient_accumulation_steps")
    if per_device is None and accumulated is None:
        return
    key = "per_device_train_batch_size" if per_device is not None else "gradient_accumulation_steps"
    rows = (per_device or DEFAULT_BATCH_SIZE) * (accumulated or 1) * world_size
    options.notes.append(
        f"batch: {per_device or DEFAULT_BATCH_SIZE} per device x {accumulated or 1} accumulated x {world_size} devices "
        f"= {rows} rows per step"
    )
    if options.online:
        group = options.get("group_size") or DEFAULT_GROUP
        if rows % group:
            raise Refused(key, f"{rows} completions per step (see {key}) are not groups of num_generations = {group}")
        options.set("prompts_per_step", rows // group, key)
        return
    options.set("batch_size", rows, key)
    seq_len = options.get("seq_len")
    if seq_len is not None:
        tokens = (per_device or DEFAULT_BATCH_SIZE) * (seq_len + 1) * (2 if paired else 1)
        options.compute("tokens_per_microbatch", tokens, "as many rows as per_device_train_batch_size, at full length")
