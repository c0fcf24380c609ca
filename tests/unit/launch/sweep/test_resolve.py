"""Experiment files become commands of ours: the product of lists, known names, computed values, refusals with lines."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.sweep.conftest import Write

from tandem.algorithms.losses import ALIGN_LOSSES
from tandem.commands.align import AlignConfig
from tandem.commands.rl import RLConfig
from tandem.launch.sweep.algorithms import ALGORITHMS, DISTRIBUTED
from tandem.launch.sweep.arguments import ELSEWHERE
from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.expand import expand
from tandem.launch.sweep.resolve import Resolver, SubExperiment
from tandem.launch.sweep.rules import value_at
from tandem.utils.errors import UserError


def resolve(path: Path) -> list[SubExperiment]:
    resolver = Resolver(read_document(path))
    return resolver.resolve_all(expand(resolver.document))


ONLINE: Any = {"algorithm": "grpo", "script": ("env: reverse-text",)}


def config_of(path: Path) -> Any:
    (run,) = resolve(path)
    return run.config


def test_lists_multiply_and_names_tell_runs_apart(write: Write, tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(tiny_model)
    path = write("learning_rate: [5.0e-6, 1.0e-5, 1.0e-6]", algorithm="[dpo, kto]", model=f"[{tiny_model}, {other}]")
    runs = resolve(path)
    assert len({run.name for run in runs}) == 12
    assert [run.name for run in runs][:4] == [
        *("dpo-reverse_text-lr5e-06", "dpo-reverse_text-lr1e-05", "dpo-reverse_text-lr1e-06", "dpo-other-lr5e-06"),
    ]
    losses = [run.config.model_dump()["loss"]["type"] for run in runs]
    assert losses == ["dpo"] * 6 + ["kto"] * 6
    assert {run.config.model_dump()["optimizer"]["lr"] for run in runs} == {5e-6, 1e-5, 1e-6}
    assert [run.name for run in resolve(path)] == [run.name for run in runs]


def test_paths_that_end_alike_have_names_of_their_own(write: Write, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / tiny_model.name).symlink_to(tiny_model)
    names = [run.name for run in resolve(write(model=f"[{tiny_model}, {tmp_path}/again/{tiny_model.name}]"))]
    assert len(set(names)) == 2 and all(name.startswith("reverse_text.") for name in names)


def test_a_list_that_is_one_value_is_nested(write: Write) -> None:
    config = config_of(write("lora_target_modules: [[q_proj, v_proj]]", "report_to: [[tensorboard, wandb]]"))
    assert config.lora.targets == ["q_proj", "v_proj"]
    assert config.metrics.report_to == ["tensorboard", "wandb"]


def test_arguments_of_the_trainer_become_ours(write: Write) -> None:
    config = config_of(
        write(
            *("beta: 0.2", "max_length: 64", "max_prompt_length: 32", "num_train_epochs: 2", "bf16: true"),
            *(
                "eval_strategy: steps",
                "eval_steps: 0.05",
                "per_device_train_batch_size: 2",
                "per_device_eval_batch_size: 2",
            ),
            *("gradient_accumulation_steps: 8", "gradient_checkpointing: true", "adam_beta2: 0.95", "warmup_steps: 3"),
            *(
                "lr_scheduler_type: cosine",
                "save_steps: 7",
                "seed: 4",
                "remove_unused_columns: false",
                "logging_dir: None",
                "trust_remote_code: true",
            ),
            slurm=("nodes: 2", "gres: gpu:4"),
            rest="environment:\n  WANDB_PROJECT: salamandra\n  WANDB_NAME: first",
        )
    )
    assert isinstance(config, AlignConfig)
    assert (config.loss.beta, config.seq_len, config.epochs, config.model.dtype) == (0.2, 64, 2, "bfloat16")
    assert (config.data.max_prompt_len, config.data.on_bad_row, config.data.eval_size) == (32, "truncate", 0.05)
    assert (config.eval.every, config.batch_size, config.tokens_per_microbatch) == (0.05, 2 * 8 * 8, 2 * 2 * 65)
    assert (config.parallel.ranks, config.parallel.gradient_checkpointing) == (4, 1)
    assert (config.optimizer.betas, config.scheduler.type, config.scheduler.warmup_steps) == ([0.9, 0.95], "cosine", 3)
    assert (config.checkpoint.every, config.seed, config.model.trust_remote_code) == (7, 4, True)
    assert (config.metrics.project, config.metrics.run_name) == ("salamandra", "first")


def test_checkpointing_has_its_new_name_too(write: Write) -> None:
    """transformers renamed it in 5.23."""
    config = config_of(
        write("activation_checkpointing: true", "activation_checkpointing_kwargs: {use_reentrant: false}")
    )
    assert isinstance(config, AlignConfig) and config.parallel.gradient_checkpointing == 1


@pytest.mark.parametrize("name", sorted(DISTRIBUTED))
def test_ways_to_shard_are_honoured_and_explained(write: Write, name: str) -> None:
    path = write(algorithm=f"dpo\n  distributed_config: {name}")
    (run,) = resolve(path)
    parallel = run.config.model_dump()["parallel"]
    assert {key: parallel[key] for key in DISTRIBUTED[name].options} == DISTRIBUTED[name].options
    assert any(note.startswith(f"distributed_config = {name}: ") for note in run.notes)


def test_every_offline_objective_has_its_name() -> None:
    assert set(ALIGN_LOSSES) < set(ALGORITHMS)


@pytest.mark.parametrize("name", sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.is_online))
def test_online_algorithms_run_by_name(write: Write, tiny_model: Path, name: str) -> None:
    script = ("env: reverse-text",)
    arguments = ["max_steps: 20", "max_completion_length: 16", "max_prompt_length: 16", "eval_steps: 0.1"]
    arguments += [f"trainer.loss.teacher.model: {tiny_model}"] if name == "distillation" else []
    arguments += ["num_generations: 4"] if name not in ("ppo", "distillation") else []
    arguments += ["per_device_train_batch_size: 8", "learning_rate: 1.0e-4"]
    config = config_of(write(*arguments, algorithm=name, script=script))
    assert isinstance(config, RLConfig)
    assert (config.seq_len, config.orchestrator.eval.every, config.trainer.optimizer.lr) == (32, 2, 1e-4)
    rollouts = config.orchestrator.prompts_per_step * config.orchestrator.group_size
    assert rollouts == 8


def test_a_dataset_is_an_environment_of_online_algorithms(write: Write) -> None:
    env = config_of(write("max_steps: 5", algorithm="grpo")).orchestrator.env
    assert env.id == "dataset" and env.args["path"].endswith("pairs.jsonl")


def test_options_of_ours_are_taken_by_their_own_names(write: Write) -> None:
    config = config_of(write("batch_size: 6", "loss.reference: model", "data.shuffle: false"))
    assert (config.batch_size, config.loss.reference, config.data.shuffle) == (6, "model", False)


def test_shares_of_training_are_ours_whatever_says_how_long_it_is(write: Write) -> None:
    """Epochs become steps when the rows are read."""
    for length in ("num_train_epochs: 2", "max_steps: 40"):
        config = config_of(write(length, "warmup_ratio: 0.03", "warmup_steps: 0", "save_steps: 0.26"))
        assert (config.scheduler.warmup_steps, config.checkpoint.every) == (0.03, 0.26)
    config = config_of(write("save_steps: 7", "warmup_ratio: 0", "warmup_steps: 5"))
    assert (config.checkpoint.every, config.scheduler.warmup_steps) == (7, 5)


@pytest.mark.parametrize(
    ("algorithm", "loss_type"), [("dpo", "sigmoid"), ("dpo", "[[sigmoid]]"), ("ipo", "ipo"), ("kto", "kto")]
)
def test_the_loss_of_the_algorithm_may_be_given_by_the_name_of_trl(
    write: Write, algorithm: str, loss_type: str
) -> None:
    config = config_of(write(f"loss_type: {loss_type}", algorithm=algorithm))
    assert config.loss.type == algorithm


@pytest.mark.parametrize(
    ("algorithm", "arguments", "clips"),
    [
        ("grpo", ("epsilon: 0.1",), (0.1, 0.1)),
        ("grpo", ("epsilon: 0.1", "epsilon_high: 0.3"), (0.1, 0.3)),
        ("dapo", ("epsilon: 0.1",), (0.1, 0.28)),
    ],
)
def test_epsilon_clips_on_both_sides(write: Write, algorithm: str, arguments: tuple[str, ...], clips: object) -> None:
    loss = config_of(write("max_steps: 5", *arguments, algorithm=algorithm, script=("env: reverse-text",))).trainer.loss
    assert (loss.clip_low, loss.clip_high) == clips


def test_no_clipping_is_zero_as_in_transformers(write: Write) -> None:
    assert config_of(write("max_grad_norm: 0")).optimizer.max_grad_norm == math.inf
    assert config_of(write("max_grad_norm: 0.5")).optimizer.max_grad_norm == 0.5


def test_what_a_table_says_is_not_computed_again(write: Write) -> None:
    config = config_of(
        write("scheduler: {type: cosine, warmup_steps: 2}", "warmup_steps: 2", "loss.beta: 0.3", "beta: 0.3")
    )
    assert (config.scheduler.type, config.scheduler.warmup_steps, config.loss.beta) == ("cosine", 2, 0.3)


def test_ranks_of_ones_own_count_in_the_batch(write: Write) -> None:
    config = config_of(write("parallel.ranks: 3", "per_device_train_batch_size: 2"))
    assert (config.parallel.ranks, config.batch_size) == (3, 6)


def test_engines_are_chosen_by_name(write: Write) -> None:
    path = write("max_steps: 5", "use_vllm: [true, false]", algorithm="grpo", script=("env: reverse-text",))
    assert [run.config.model_dump()["inference"]["engine"] for run in resolve(path)] == ["vllm", "native"]


def test_lora_may_be_one_of_two_values(write: Write) -> None:
    adapter, whole = resolve(write("use_peft: [true, false]", "lora_r: 4"))
    assert adapter.config.model_dump()["lora"]["rank"] == 4 and whole.config.model_dump()["lora"] is None


def test_a_file_of_ours_may_be_the_base(write: Write, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('max_steps = 7\n[orchestrator.env]\nid = "reverse-text"\n')
    config = config_of(write("learning_rate: 1.0e-4", algorithm="rloo", script=(f"config: {base}",)))
    assert (config.max_steps, config.orchestrator.env.id, config.trainer.loss.type) == (7, "reverse-text", "rloo")


def test_no_limit_of_steps_is_as_if_none_was_given(write: Write, tmp_path: Path) -> None:
    assert (config_of(write("max_steps: -1")).epochs, config_of(write()).epochs) == (3, 3)
    assert config_of(write("max_steps: -1", "num_train_epochs: 2")).epochs == 2
    base = tmp_path / "base.toml"
    base.write_text("max_steps = 7\n")
    config = config_of(write("max_steps: -1", f"config: {base}"))
    assert (config.max_steps, config.epochs) == (7, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"device": "auto", "model.dtype": "float32", "lora": None, "data.on_bad_row": "error"}),
        ((), {"epochs": 3.0, "parallel.ranks": 1, "scheduler.type": "linear", "eval.every": None}),
        (("use_cpu: true",), {"device": "cpu"}),
        (("use_cpu: false",), {"device": "auto"}),
        (("report_to: wandb",), {"metrics.report_to": ["wandb"]}),
        (("report_to: none",), {"metrics.report_to": []}),
        (("data_seed: 5",), {"seed": 5}),
        (("precompute_ref_log_probs: true",), {"loss.reference": "precomputed"}),
        (("precompute_ref_log_probs: false",), {"loss.reference": "model"}),
        (("num_train_epochs: 2", "max_steps: 1"), {"max_steps": 1, "epochs": None}),
        (("gradient_accumulation_steps: 2",), {"batch_size": 16}),
        (
            ("per_device_train_batch_size: 1", "gradient_accumulation_steps: 1", "max_length: 64"),
            {"batch_size": 1, "tokens_per_microbatch": 2 * 65},
        ),
        (("gradient_accumulation_steps: 1", "max_length: 64"), {"tokens_per_microbatch": 2 * 8 * 65}),
        (("bf16: false", "torch_dtype: float32", "dtype: auto"), {"model.dtype": "float32"}),
        (("torch_dtype: bfloat16", "dtype: float32"), {"model.dtype": "bfloat16"}),
        (("torch_dtype: float32", "dtype: bfloat16"), {"model.dtype": "bfloat16"}),
        (("adam_beta1: 0.8",), {"optimizer.betas": [0.8, 0.999]}),
        (("lr_scheduler_type: constant",), {"scheduler.type": "constant"}),
        (("lr_scheduler_type: constant_with_warmup",), {"scheduler.type": "constant"}),
        (("lr_scheduler_type: linear",), {"scheduler.type": "linear"}),
        (
            ("lr_scheduler_type: cosine_with_min_lr", "lr_scheduler_kwargs: {min_lr_rate: 0.1}"),
            {"scheduler.type": "cosine", "scheduler.min_lr_ratio": 0.1},
        ),
        (("eval_strategy: no", "eval_steps: 5"), {"eval.every": None, "data.eval_size": None}),
        (("evaluation_strategy: no", "eval_steps: 5"), {"eval.every": None}),
        (("evaluation_strategy: steps", "eval_steps: 5"), {"eval.every": 5, "data.eval_size": 0.05}),
        (("eval_steps: 5", "data.eval_path: {rows}"), {"eval.every": 5, "data.eval_size": None}),
        (("save_strategy: no", "save_steps: 5"), {"checkpoint.every": None}),
        (("save_strategy: steps",), {"checkpoint.every": 25}),
        (("use_peft: true",), {"lora.rank": 16}),
        (("parallel.timeout_s: 90",), {"parallel.timeout_s": 90}),
    ],
)
def test_each_argument_says_what_transformers_says(
    write: Write, tmp_path: Path, arguments: tuple[str, ...], expected: dict[str, Any]
) -> None:
    rows = tmp_path / "pairs.jsonl"
    config = config_of(write(*(line.replace("{rows}", str(rows)) for line in arguments))).model_dump()
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("algorithm", "arguments", "expected"),
    [
        ("grpo", (), {"inference.engine": "native", "slurm": None, "orchestrator.prompts_per_step": 16}),
        ("grpo", ("max_prompt_length: 16",), {"seq_len": 16 + 128}),
        ("grpo", ("max_prompt_length: 1",), {"seq_len": 1 + 128}),
        ("grpo", ("max_steps: -1", "eval_steps: 1"), {"orchestrator.eval.every": 1}),
        ("grpo", ("per_device_train_batch_size: 8",), {"orchestrator.prompts_per_step": 1}),
        ("grpo", ("gradient_accumulation_steps: 2",), {"orchestrator.prompts_per_step": 2}),
        ("grpo", ("num_train_epochs: 2",), {"max_steps": 5}),
        ("grpo", ("optimizer.lr: 0.5", "temperature: 0.5"), {"trainer.optimizer.lr": 0.5}),
        ("grpo", ("updates_per_batch: 2",), {"trainer.updates_per_batch": 2}),
        ("grpo", ("env_args: {a.b: 1, c: {d: 2}}",), {"orchestrator.env.args": {"a.b": 1, "c": {"d": 2}}}),
        ("grpo", ("reward_funcs: exact_match",), {"orchestrator.env.reward": "exact_match"}),
        ("dr_grpo", (), {"trainer.loss.constant_length": 128, "trainer.loss.normalize": "constant"}),
        ("dr_grpo", ("max_completion_length: 16",), {"trainer.loss.constant_length": 16}),
        ("dr_grpo", ("loss.constant_length: 9",), {"trainer.loss.constant_length": 9}),
        ("dapo", (), {"trainer.loss.clip_low": 0.2, "trainer.loss.clip_high": 0.28}),
        ("reinforce_pp", (), {"trainer.loss.kl.coef": 0.001}),
        ("ppo", (), {"orchestrator.group_size": 1, "orchestrator.advantage.type": "reward"}),
        (
            "distillation",
            ("trainer.loss.teacher.model: {model}",),
            {"orchestrator.group_size": 1, "trainer.loss.teacher.coef": 1.0},
        ),
    ],
)
def test_each_argument_of_online_algorithms_says_what_trl_says(
    write: Write, tiny_model: Path, algorithm: str, arguments: tuple[str, ...], expected: dict[str, Any]
) -> None:
    lines = [line.replace("{model}", str(tiny_model)) for line in arguments]
    limit = () if any(line.startswith("max_steps") for line in lines) else ("max_steps: 5",)
    config = config_of(write(*limit, *lines, algorithm=algorithm, script=("env: reverse-text",))).model_dump()
    assert {path: value_at(config, path) for path in expected} == expected


DONE_ANYWAY = {
    True: ("do_train", "do_eval", "assistant_only_loss", "completion_only_loss", "enable_jit_checkpoint"),
    False: (
        *("do_predict", "save_only_model", "ignore_data_skip", "auto_find_batch_size", "load_in_8bit", "load_in_4bit"),
        *("use_dora", "push_to_hub", "load_best_model_at_end", "fp16", "fp16_full_eval", "sync_ref_model"),
        *("activation_offloading", "batch_eval_metrics", "eval_on_start", "eval_delay", "label_smoothing_factor"),
    ),
}


def test_what_is_done_anyway_may_be_asked_for_and_the_opposite_is_refused(write: Write) -> None:
    values = [(name, value) for value, names in DONE_ANYWAY.items() for name in names]
    assert config_of(write(*(f"{name}: {value}" for name, value in values))) == config_of(write())
    for name, value in values:
        with pytest.raises(UserError, match=f"line 11: {name} = {not value} is not supported"):
            resolve(write(f"{name}: {not value}"))
    config_of(write("max_steps: 2", "shuffle_dataset: true", **ONLINE))
    with pytest.raises(UserError, match="line 12: shuffle_dataset = False is not supported"):
        resolve(write("max_steps: 2", "shuffle_dataset: false", **ONLINE))


def test_rows_of_objectives_without_pairs_are_sequences(write: Write) -> None:
    sizes = ("per_device_train_batch_size: 2", "max_length: 64")
    for algorithm, sequences in (("sft", 1), ("kto", 1), ("bco", 1), ("cpo", 2)):
        assert config_of(write(*sizes, algorithm=algorithm)).tokens_per_microbatch == sequences * 2 * 65


def test_the_experiment_wins_over_its_base_and_the_algorithm_over_both(write: Write, tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("seed = 5\nmax_steps = 7\n[scheduler]\nwarmup_steps = 5\n[loss]\ntype = 'ipo'\n")
    second.write_text("max_steps = 8\n")
    both = f"config: [[{first}, {second}]]"
    config = config_of(write("seed: 6", "warmup_steps: 0", both))
    assert (config.seed, config.max_steps, config.scheduler.warmup_steps, config.loss.type) == (6, 8, 0, "dpo")
    assert config_of(write("warmup_ratio: 0", both)).scheduler.warmup_steps == 0


def test_a_mistake_in_the_base_is_told_without_a_line_of_the_experiment(write: Write, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text("seed = 'x'\n")
    with pytest.raises(UserError, match=r"config\.yaml: seed = 'x' is not valid"):
        resolve(write(f"config: {base}"))


def test_what_was_computed_or_makes_no_difference_is_noted(write: Write) -> None:
    options: Any = {"slurm": ("nodes: 2", "inference_nodes: 1")}
    arguments = ("max_steps: 5", "logging_steps: 1", "per_device_train_batch_size: 8")
    (run,) = resolve(write(*arguments, **options))
    assert run.notes == [
        "inference_nodes: dpo has no inference servers; all nodes train",
        "logging_steps: every step is logged",
        "parallel.ranks = 1: one rank per GPU of a node",
        "scheduler.type = linear: the default of transformers",
        "batch: 8 per device x 1 accumulated x 2 devices = 16 rows per step",
    ]
    (run,) = resolve(write(*arguments, **options, algorithm="dr_grpo", script=("env: reverse-text",)))
    assert run.notes == [
        "logging_steps: every step is logged",
        "trainer.loss.constant_length = 128: the longest completion",
        "trainer.scheduler.type = linear: the default of transformers",
        "batch: 8 per device x 1 accumulated x 1 devices = 8 rows per step",
    ]
    (run,) = resolve(write("max_steps: 5"))
    assert len(run.notes) == 2


def test_online_algorithms_train_on_the_nodes_that_do_not_serve(write: Write) -> None:
    arguments = ("max_steps: 5", "per_device_train_batch_size: 2", "num_generations: 4")
    config = config_of(write(*arguments, **ONLINE, slurm=("nodes: 3", "inference_nodes: 1", "gres: gpu:4")))
    assert (config.slurm.nodes, config.slurm.inference_nodes) == (3, 1)
    assert config.orchestrator.prompts_per_step == 2 * 4 * 2 // 4
    config = config_of(write("max_steps: 5", **ONLINE, slurm=("nodes: 2",)))
    assert (config.slurm.nodes, config.slurm.inference_nodes) == (2, 1)


def test_several_runs_have_their_names_behind_that_of_the_tracker(write: Write) -> None:
    rest = "environment:\n  WANDB_NAME: mine\n  HF_TOKEN: abc"
    runs = resolve(write("seed: [1, 2]", rest=rest))
    assert [run.config.model_dump()["metrics"]["run_name"] for run in runs] == ["mine-seed1", "mine-seed2"]
    assert (runs[0].environment, runs[0].secrets) == ({"WANDB_NAME": "mine"}, {"HF_TOKEN": "abc"})
    assert runs[0].evaluation_folder == runs[0].folder / "evaluation"


def test_a_virtual_environment_may_be_given_by_a_relative_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "3" / "bin").mkdir(parents=True)
    (tmp_path / "3" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    (run,) = resolve(write(algorithm="dpo\n  venv: 3", slurm=("venv: other",)))
    assert run.slurm.venv == tmp_path / "3"


def test_models_of_the_hub_are_fetched_unless_it_is_switched_off(
    write: Write, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def fetch(name: Path) -> None:
        fetched.append(name)
        folder = tmp_path / "hub" / "models--org--tiny"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / "abc").symlink_to(tiny_model)

    monkeypatch.setattr("tandem.launch.sweep.checks.fetch_model", fetch)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"model\.name = 'org/tiny' is not a directory"):
        resolve(write(model="org/tiny"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    resolve(write())
    assert fetched == []
    resolve(write("max_length: 16", model="org/tiny"))
    assert fetched == [Path("org/tiny")]


def test_the_evaluation_takes_the_trained_model(write: Write) -> None:
    def model_of(*arguments: str, algorithm: str = "grpo", more: str = "") -> str:
        script = ("env: reverse-text",) if algorithm == "grpo" else None
        rest = f"evaluation:\n  env: reverse-text{more}"
        (run,) = resolve(write("max_steps: 5", *arguments, algorithm=algorithm, script=script, rest=rest))
        assert run.evaluation is not None and run.evaluation["output_dir"] == str(run.evaluation_folder)
        return run.evaluation["model"].removeprefix(f"{run.folder}/")

    assert model_of() == "run/weights/latest"
    assert model_of("lora_r: 4") == "run/merged/latest"
    assert model_of("lora_r: 4", algorithm="dpo") == "run/weights/latest"
    assert model_of(more="\n  model: [/other]") == "/other"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"algorithm": "dpoo"}, "line 2: algorithm = 'dpoo' is not known; did you mean 'dpo'?"),
        (("num_train_epochs: 2",), ONLINE, "line 11: num_train_epochs counts passes over rows, and `rl` counts steps"),
        (
            ("num_generations: 4", "per_device_train_batch_size: 6"),
            ONLINE,
            "line 12: 6 completions per step (see per_d",
        ),
        (
            ("num_generations: 5", "gradient_accumulation_steps: 3"),
            ONLINE,
            "line 12: 24 completions per step (see grad",
        ),
        (("eval_steps: 0.1",), ONLINE, "line 11: eval_steps = 0.1 is a share of max_steps, which is not given"),
        (
            ("desirable_weight: 2.0",),
            ONLINE,
            "line 11: desirable_weight has no meaning for `rl`; leave it out",
        ),
        (("use_vllm: false",), {}, "line 11: use_vllm is for online algorithms"),
        (("torch_dtype: float16",), {}, "line 11: torch_dtype = 'float16' is not supported; give bfloat16 or float32"),
        (("bf16: true", "model.dtype: float32"), {}, "line 11: bf16 and model.dtype both set model.dtype"),
        (("dtype: bfloat16", "model.dtype: float32"), {}, "line 11: dtype and model.dtype both set model.dtype"),
        (("adam_beta1: 0.8", "optimizer.betas: [[0.9, 0.9]]"), {}, "line 11: adam_beta1 and optimizer.betas both set"),
        (("adam_beta2: 0.8", "optimizer.betas: [[0.9, 0.9]]"), {}, "line 11: adam_beta2 and optimizer.betas both set"),
        (("lr_scheduler_type: polynomial",), {}, "line 11: lr_scheduler_type = 'polynomial' is not here; valid: const"),
        (
            ("lr_scheduler_kwargs: {power: 2}",),
            {},
            "line 11: lr_scheduler_kwargs.power is not here; valid: min_lr_rate",
        ),
        (("eval_strategy: steps",), {}, "line 11: eval_strategy: steps needs eval_steps"),
        (
            ("save_strategy: epoch",),
            {},
            "line 11: save_strategy = 'epoch' is not here; give steps and save_steps, or no",
        ),
        (("report_to: mlflow",), {}, "line 11: report_to = 'mlflow' is not here; valid: tensorboard, wandb, trackio,"),
        (("seed: 1", "data_seed: 2"), {}, "line 12: data_seed and seed both set seed, to 2 and 1; give one"),
        (("max_steps: true",), {}, "line 11: max_steps = True is not a whole number from 1 on"),
        (("loss_type: IPO",), {}, "use execution.algorithm: ipo"),
        (
            ("seed: 1", "num_train_epochs: 2", "data.streaming: true"),
            {},
            "line 12: epochs = 2 counts rows, and data.str",
        ),
        (("lora_target_modules: [[q_proj, 3]]",), {}, "line 11: lora.targets"),
        (("config: 3",), {}, "line 11: config file '3' must end in one of"),
        (
            (),
            {"algorithm": "dpo\n  distributed_config: 3"},
            "line 3: distributed_config = 3 is not known; known: DDP, DS",
        ),
        (
            (),
            {"algorithm": "distillation", "script": ("env: reverse-text",)},
            "line 2: algorithm = 'distillation' needs",
        ),
        ((), {"slurm": ("inference_nodes: 1",)}, "line 5: inference_nodes = 1 leaves none of nodes = 1 to the trainer"),
        (
            (),
            {"algorithm": "reward", "rest": "evaluation:\n  env: reverse-text"},
            "line 12: algorithm = 'reward' trains no model that answers; leave it out",
        ),
        (
            (),
            {"algorithm": "dpo\n  distributed_config: DSZero4"},
            "line 3: distributed_config = 'DSZero4' is not known",
        ),
        (("learning_rate: .nan",), {}, "optimizer.lr = nan is not valid: input should be"),
        (("learning_rate: [1.0e-4, .inf]",), {}, "optimizer.lr = inf is not valid: input should be a finite number"),
        ((), {"slurm": ("nods: 2",)}, "line 5: sbatch has no option 'nods'; did you mean 'nodes'?"),
        ((), {"slurm": ("hold: 1",)}, "line 5: hold = '1': sbatch takes no value for it; give true or false"),
        ((), {"slurm": ("nodes: 1", "time: {a: 1}")}, "line 6: time = {'a': '1'} is not one value"),
        ((), {"slurm": ('comment: "a\\nb"',)}, "line 5: comment = 'a\\nb' has a line break"),
        ((), {"slurm": ("requeue: no", "no-requeue: no")}, "line 4: requeue and no-requeue contradict each other"),
        ((), {"slurm": ("venv: /nope",)}, "line 5: venv = '/nope' is no virtual environment"),
        ((), {"rest": 'environment:\n  "A B": 1'}, "line 13: 'A B' is no name of a variable"),
        ((), {"rest": "environment:\n  A: {b: 1}"}, "line 13: A = {'b': '1'} is not a text of one line"),
        ((), {"rest": 'environment:\n  A: "a\\nb"'}, "line 13: A = 'a\\nb' is not a text of one line"),
        ((), {"slurm": ("array: 1-3",)}, "line 5: 'array' is not yours to set"),
        ((), {"model": "/nowhere"}, "line 9: model.name = '/nowhere' is not a directory"),
        (("fp16: true",), {}, "line 11: fp16 = True is not supported: half precision here is bfloat16; use bf16: true"),
        (("push_to_hub: true",), {}, "line 11: push_to_hub = True is not supported"),
        (("deepspeed: ds.json",), {}, "line 11: deepspeed is not supported: use execution.distributed_config"),
        (("learning_rat: 1.0",), {}, "line 11: unknown argument 'learning_rat'; did you mean 'learning_rate'?"),
        (("optim: adafactor",), {}, "line 11: optim = 'adafactor' is not supported: the optimizer is AdamW"),
        (("learning_rate: -1.0",), {}, "line 11: optimizer.lr = -1.0 is not valid"),
        (("learning_rate: true",), {}, "line 11: optimizer.lr: true is not a number"),
        (("seed: 1", "learning_rate: high"), {}, "line 12: optimizer.lr = 'high' is not valid"),
        (("max_length: 99999",), {}, "line 11: seq_len = 99999 is above max_position_embeddings"),
        (("num_generations: 4",), {}, "line 11: num_generations has no meaning for `align`; leave it out"),
        (("warmup_ratio: 1.0",), {}, "line 11: warmup_ratio = 1.0 is not a share of training; give 0 or more, below 1"),
        (("warmup_ratio: 0.1", "warmup_steps: 5"), {}, "warmup_ratio both set scheduler.warmup_steps, to 5 and 0.1"),
        (("loss_type: ipo",), {}, "line 11: loss_type = 'ipo' is not what algorithm = 'dpo' does: use execution.algo"),
        (("loss_type: robust",), {}, "line 11: loss_type = 'robust' is not what algorithm = 'dpo' does: that is loss."),
        (("loss_type: aot",), {}, "line 11: loss_type = 'aot' is not what algorithm = 'dpo' does: leave it out; exec"),
        (("save_steps: 1.5",), {}, "line 11: checkpoint.every: 1.5 is neither a whole number of steps nor a fraction"),
        (("max_grad_norm: off",), {}, "line 11: max_grad_norm = False is not a number"),
        (("eval_strategy: epoch",), {}, "line 11: eval_strategy = 'epoch' is not here"),
        (("max_length: 8", "max_seq_length: 9"), {}, "max_seq_length and max_length both set seq_len, to 9 and 8"),
        (("beta: [0.1, 0.2]", "loss.beta: 0.3"), {}, "line 12: loss.beta and beta both set loss.beta, to 0.3 and 0.1"),
        (("loss.beta: 0.3", "beta: 0.1"), {}, "line 12: beta and loss.beta both set loss.beta, to 0.1 and 0.3"),
        (("beta: 0.1", "loss: {beta: 0.3}"), {}, "line 12: loss and beta both set loss.beta, to 0.3 and 0.1"),
        ((), {"script": ("dataset_name: /no/rows.jsonl",)}, "line 7: dataset_name = '/no/rows.jsonl' does not exist"),
        (("learning_rate: [1.0, 1.0]",), {}, "line 11: learning_rate has 1.0 twice"),
        (("learning_rate: [1, 2.0, 1.0]",), {}, "line 11: learning_rate has 1 and 1.0, which would be the same run"),
        (("seed: [1, 2]", "bf16: [true, 1]", "beta: [0.1, 0.2]"), {}, "line 12: bf16 has True and 1, which would be"),
        (("num_train_epochs: [None, 3]",), {}, "line 11: num_train_epochs has None and 3, which would be the same run"),
        ((), {"algorithm": "[dpo, DPO]"}, "line 2: algorithm has 'dpo' and 'DPO', which would be the same run"),
        (("max_steps: three",), {}, "line 11: max_steps = 'three' is not a whole number from 1 on"),
        (("max_steps: 0",), {}, "line 11: max_steps = 0 is not a whole number from 1 on; give one, or -1"),
        (("seed: 1", "max_steps: -2"), {}, "line 12: max_steps = -2 is not a whole number from 1 on"),
        (("per_device_train_batch_size: 0",), {}, "line 11: per_device_train_batch_size = 0 is not a count"),
        (("gradient_accumulation_steps: two",), {}, "line 11: gradient_accumulation_steps = 'two' is not a count"),
        (("eval_steps: often",), {}, "line 11: eval_steps = 'often' is not a number"),
        (("bf16: maybe",), {}, "line 11: bf16 = 'maybe' is neither true nor false"),
        (("lr_scheduler_kwargs: 3",), {}, "line 11: lr_scheduler_kwargs = 3 is not a table"),
        (("dataset_name: x.jsonl",), {}, "line 11: 'dataset_name' is given twice (first in line 7)"),
        ((), {"model": "None"}, "line 8: model_name_or_path is required"),
        ((), {"script": ("dataset_name: None",)}, "line 6: dataset_name is required"),
        (
            (),
            {"output_dir": "/dev/null/sweep"},
            "line 3: output_dir = '/dev/null/sweep' cannot be written: '/dev/null' is a file; give another one",
        ),
        ((), {"output_dir": "/dev/null"}, "line 3: output_dir = '/dev/null' cannot be written: it is a file"),
        ((), {"output_dir": '"/tmp/a\\nb"'}, "cannot be written: there is a line break in it"),
        ((), {"rest": "evaluation:\n  env: revers-text"}, "line 13: env.id = 'revers-text' is not known"),
        ((), {"algorithm": "grpo", "script": ("env: nope",)}, "line 7: env = 'nope' is not known"),
        (
            (),
            {"algorithm": "grpo", "script": ("env: reverse-text", "reward_funcs: exact_mtch")},
            "line 8: reward_funcs = 'exact_mtch' is not known; did you mean 'exact_match'?",
        ),
        (
            (),
            {"algorithm": "grpo", "script": ("dataset_name: /no/rows.jsonl",)},
            "line 7: dataset_name = '/no/rows.jsonl' does not exist",
        ),
    ],
)
def test_mistakes_are_told_with_their_line(
    write: Write, arguments: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        resolve(write(*arguments, **options))
    assert message in str(error.value)


def test_values_that_mean_nothing_beside_another_make_one_run(write: Write) -> None:
    """Its name stays when there are more of them."""
    names = ["use_peftFalse", "use_peftTrue-lora_r8", "use_peftTrue-lora_r16"]
    for values in ("8, 16", "4, 8, 16"):
        runs = resolve(write("use_peft: [false, true]", f"lora_r: [{values}]", "lora_dropout: [0.0, 0.1]"))
        assert [run.name for run in runs if run.config.model_dump()["lora"] is None] == ["use_peftFalse"]
        assert len(runs) == 1 + 2 * len(values.split())
    (whole, *_) = runs
    assert whole.variant.varied == {"use_peft": False} and whole.folder.name == "use_peftFalse"
    assert any("makes no use of lora_r, lora_dropout, so it is one run" in note for note in whole.notes)
    assert [run.name for run in resolve(write("use_peft: [false, true]", "lora_r: [8, 16]"))] == names


def test_values_that_others_tell_apart_are_several(write: Write) -> None:
    own = ("max_steps: 2", "env_args: [{limit: 1}, {limit: 1.0}]")  # for the environment to tell apart
    assert len(resolve(write(*own, algorithm="grpo", script=("env: reverse-text",)))) == 2


@pytest.mark.parametrize(
    ("argument", "options", "told"),
    [
        ("gradient_accumulation_step: 2", {}, "did you mean 'gradient_accumulation_steps'?"),
        ("grad_clip: 1.0", {}, "did you mean 'optimizer.max_grad_norm'?"),
        ("kl_coef: 0.1", "online", "did you mean 'trainer.loss.kl.coef'?"),
        ("generation_batch_size: 8", "online", "that counts completions, prompts_per_step counts prompts"),
        ("reference_free: true", {}, 'true is loss.reference = "none"'),
        ("neftune_noise_alpha: 5", {}, "docs/sweeps.md lists what there is"),
    ],
)
def test_an_unknown_argument_is_told_by_the_table_of_all_commands(
    write: Write, argument: str, options: Any, told: str
) -> None:
    name = argument.partition(":")[0]
    with pytest.raises(UserError) as error:
        resolve(write("max_steps: 5", argument, **(ONLINE if options == "online" else options)))
    assert f"line 12: unknown argument {name!r}; {told}" in str(error.value)


def test_options_of_the_experiment_itself_are_no_arguments(write: Write) -> None:
    for name in ELSEWHERE:
        with pytest.raises(UserError, match=f"{name} is not supported: "):
            resolve(write(f"{name}: a"))
