"""Names from elsewhere lead to ours."""

from pathlib import Path

import pytest

from tandem.commands.align import AlignConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.explain import option_paths
from tandem.config.foreign import ALGORITHMS
from tandem.config.hints import EXPLAINED, FOREIGN, options_meant
from tandem.config.inference import InferenceConfig

ROOT = Path(__file__).parents[3]
ROWS = ("--model.name", "m", "--data.path", "rows.jsonl")
COMPLETIONS = ("batch-size", "orchestrator.batch-size", "generation-batch-size", "per-device-train-batch-size")
ALL_PATHS = {path for cls in (RLConfig, SFTConfig, AlignConfig, InferenceConfig) for path in option_paths(cls)}


@pytest.mark.parametrize(
    ("flag", "rl", "sft", "align"),
    [
        ("--num-epochs", None, "epochs", "epochs"),
        ("--num-train-epochs", None, "epochs", "epochs"),
        ("--learning-rate", "trainer.optimizer.lr", "optimizer.lr", "optimizer.lr"),
        ("--max-prompt-length", None, "data.max_prompt_len", "data.max_prompt_len"),
        ("--max-completion-length", "orchestrator.sampling.max_tokens", None, None),
        ("--kl-coef", "trainer.loss.kl.coef", None, None),
        ("--num-generations", "orchestrator.group_size", None, None),
        ("--temperature", "orchestrator.sampling.temperature", None, None),
        ("--rank", "trainer.lora.rank", "lora.rank", "lora.rank"),
        ("--save-steps", "checkpoint.every", "checkpoint.every", "checkpoint.every"),
        ("--lora-r", "trainer.lora.rank", "lora.rank", "lora.rank"),
        ("--model-name-or-path", "model.name", "model.name", "model.name"),
        ("--torch-dtype", "model.dtype", "model.dtype", "model.dtype"),
    ],
)
def test_the_refusal_names_our_option(refusal, rl_toml: str, flag: str, rl: str, sft: str, align: str) -> None:
    commands = ((RLConfig, ("@", rl_toml), rl), (SFTConfig, ROWS, sft), (AlignConfig, ROWS, align))
    for cls, base, ours in commands:
        message = refusal(*base, flag, "3", cls=cls)
        assert (f"did you mean {ours!r}?" in message) == (ours is not None), message


PER_DEVICE = "batch_size counts the rows of a step: rows per device × devices × gradient accumulation steps"
PER_TOKENS = "tokens_per_microbatch counts tokens: rows × seq_len"
PER_UPDATE = "tokens_per_microbatch = tokens of a step / devices / accumulation steps"
PER_STEP = "max_steps counts steps: epochs × training prompts / prompts_per_step"
WHOLE = "seq_len counts the tokens of prompt and completion together"


@pytest.mark.parametrize(
    ("flag", "cls", "told"),
    [
        *((flag, RLConfig, PER_STEP) for flag in ("--num-epochs", "--num-train-epochs", "--total-epochs")),
        *(("--per-device-train-batch-size", cls, PER_DEVICE) for cls in (SFTConfig, AlignConfig)),
        *(("--micro-batch-size", cls, PER_TOKENS) for cls in (RLConfig, SFTConfig, AlignConfig)),
        *(("--per-device-eval-batch-size", cls, PER_TOKENS) for cls in (RLConfig, SFTConfig, AlignConfig)),
        *(("--gradient-accumulation-steps", cls, PER_UPDATE) for cls in (RLConfig, SFTConfig, AlignConfig)),
        ("--steps-per-generation", RLConfig, "steps per generation / gradient accumulation steps"),
        ("--max-prompt-length", RLConfig, WHOLE),
        *(("--max-completion-length", cls, WHOLE) for cls in (SFTConfig, AlignConfig)),
    ],
)
def test_what_counts_something_else_is_converted(refusal, rl_toml: str, flag: str, cls, told: str) -> None:
    message = refusal(*(("@", rl_toml) if cls is RLConfig else ROWS), flag, "3", cls=cls)
    assert told in message and "did you mean" not in message


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--orchestrator.eval.rollouts-per-example", "did you mean 'samples'?"),
        ("--orchestrator.rollouts-per-example", "did you mean 'group_size'?"),
        ("--wandb.name", "did you mean 'orchestrator.metrics.run_name'?"),
        ("--wandb.project", "did you mean 'orchestrator.metrics.project'?"),
        ("--wandb.mode", "did you mean 'orchestrator.metrics.report_to'?"),
    ],
)
def test_a_name_may_mean_something_else_in_a_section(refusal, rl_toml: str, flag: str, told: str) -> None:
    assert told in refusal("@", rl_toml, flag, "3")


@pytest.mark.parametrize("flag", ["--trainer.scheduler.name", "--orchestrator.client.host"])
def test_options_of_another_section_are_not_told(refusal, rl_toml: str, flag: str) -> None:
    message = refusal("@", rl_toml, flag, "3")
    assert "model.name" not in message and "server.host" not in message and "; known here: " in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("scheduler.type", ["trainer.scheduler.type"]),
        ("trainer.lr", ["trainer.optimizer.lr"]),
        ("trainer.checkpoint.max_steps", ["max_steps"]),
        ("trainer.group_size", ["orchestrator.group_size"]),
        ("trainer.scheduler.name", []),
        ("orchestrator.client.host", []),
        ("trainer.host", []),
        ("trainer.nodes", []),
    ],
)
def test_an_option_elsewhere_is_meant_if_only_the_place_differs(key: str, meant: list[str]) -> None:
    assert options_meant(key, list(option_paths(RLConfig))) == meant


def test_the_same_names_in_a_file(refusal, rl_toml: str, tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("[trainer]\nlearning_rate = 1e-5\n")
    assert "did you mean 'optimizer.lr'?" in refusal("@", rl_toml, "@", str(more))


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (["--colocate"], "that is deployment = 'colocated'"),
        (["--actor-num-nodes", "2"], "start torchrun on each node"),
        (["--actor-num-gpus-per-node", "4"], "did you mean 'gpus.trainer'?"),
        (["--rollout-num-gpus", "4"], "did you mean 'gpus.inference'?"),
        (["--rollout-num-gpus-per-engine", "2"], "vllm.flags.tensor-parallel-size = 2"),
        (["--trainer-gpu-ids", "0,1"], "did you mean 'gpus.trainer'?"),
        (["--train-backend", "fsdp"], "did you mean 'trainer.parallel.strategy'?"),
        (["--data-parallel-size", "4"], "`inference --engine vllm` takes it"),
        (["--inference.parallel.tp", "4"], "tp and dp are flags of vLLM: inference.vllm.flags.tensor-parallel-size"),
        (["--trainer.ckpt.interval", "4"], "did you mean 'checkpoint'?"),
        (["--deployment.num-train-gpus", "4"], "one of: split, shared, colocated; num_train_gpus is gpus.trainer"),
    ],
)
def test_where_things_run_in_the_words_of_others(refusal, rl_toml: str, flag: list[str], told: str) -> None:
    assert told in refusal("@", rl_toml, *flag)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        *((name, "that counts completions, prompts_per_step counts prompts") for name in COMPLETIONS),
        *((name, "did you mean 'orchestrator.max_staleness'?") for name in ("max-async-level", "async-level")),
        ("environment", "did you mean 'orchestrator.env'?"),
        ("monitors", "did you mean 'orchestrator.metrics'?"),
        ("save", "did you mean 'output_dir'?"),
        ("save-interval", "did you mean 'checkpoint.every'?"),
        ("eval-interval", "did you mean 'orchestrator.eval.every'?"),
        ("rm-type", "did you mean 'orchestrator.env.reward'?"),
        ("num-rollout", "did you mean 'max_steps'?"),
        ("eps-clip", "that is both loss.clip_low and loss.clip_high"),
        ("eps-clip-high", "did you mean 'trainer.loss.clip_high'?"),
        ("advantage-estimator", "did you mean 'orchestrator.advantage.type'?"),
        ("rollout-temperature", "did you mean 'orchestrator.sampling.temperature'?"),
        ("rollout-max-response-len", "did you mean 'orchestrator.sampling.max_tokens'?"),
        ("global-batch-size", "updates_per_batch is the number of rollouts of a step / that"),
        ("prompt-data", 'that is the environment "dataset": env.id = "dataset", env.args.path'),
    ],
)
def test_names_of_prime_rl_and_slime(refusal, rl_toml: str, flag: str, told: str) -> None:
    assert f"(value '3'); {told}" in refusal("@", rl_toml, f"--{flag}", "3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[[env]]\nid = "a"',
            "it is one section, not a list: [orchestrator.env], or [[orchestrator.envs]] for several",
        ),
        ('[[orchestrator.env]]\nid = "a"', "one section, not a list: [orchestrator.env], or [[orchestrator.envs]] for"),
        ('[environment]\nid = "a"', "did you mean 'orchestrator.env'?"),
        ("[orchestrator]\nbatch_size = 128", "give the completions of a step / group_size"),
        ('[deployment]\ntype = "single_node"\nnum_infer_gpus = 1', "; num_infer_gpus is gpus.inference"),
        ('[monitors.wandb]\nproject = "a"', "did you mean 'orchestrator.metrics'?"),
    ],
)
def test_sections_of_prime_rl(refusal, rl_toml: str, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "more.toml").write_text(text)
    message = refusal("@", rl_toml, "@", str(tmp_path / "more.toml"))
    assert told in message and "scheduler" not in message


@pytest.mark.parametrize("flag", ["--lr-decay-iters", "--rollout-function-path", "--stave"])
def test_a_name_that_is_no_slip_of_one_of_ours_is_told_what_there_is(refusal, rl_toml: str, flag: str) -> None:
    message = refusal("@", rl_toml, flag, "3")
    assert "did you mean" not in message and "; known here: " in message


def test_what_is_explained_is_explained_where_it_helps(refusal) -> None:
    assert "torchrun" not in refusal(*ROWS, "--actor-num-nodes", "2", cls=SFTConfig)
    for name, told in EXPLAINED.items():
        for option in told:
            assert any(path == option or path.endswith(f".{option}") for path in ALL_PATHS)
            assert option not in FOREIGN.get(name, ())


def test_every_name_leads_somewhere() -> None:
    for name, ours in FOREIGN.items():
        for option in ours:
            assert any(path == option or path.endswith(f".{option}") for path in ALL_PATHS), f"{name}: {option}"


def test_a_name_that_could_mean_much() -> None:
    assert options_meant("type", ["a.type", "b.type", "c.type", "a.b.type"]) == ["a.type", "b.type", "c.type"]
    assert options_meant("type", ["a.x"]) == []
    assert options_meant("lr_scheduler", ["a.scheduler.type", "b.scheduler.type", "c.scheduler.type"]) == []


@pytest.mark.parametrize(
    ("cls", "option", "value", "expected"),
    [
        (RLConfig, "--trainer.loss.type", "dapo", ["clip_high = 0.28", "algorithms/dapo.toml"]),
        (RLConfig, "--trainer.loss.type", "DR-GRPO", ['orchestrator.advantage.type = "dr_grpo"', "dr_grpo.toml"]),
        (RLConfig, "--trainer.loss.type", "reinforce++", ['advantage.type = "reinforce_pp"']),
        (RLConfig, "--trainer.loss.type", "dpo", ["`align` has it"]),
        (RLConfig, "--orchestrator.advantage.type", "gae", ['trainer.loss.type = "ppo"']),
        (AlignConfig, "--loss.type", "grpo", ["`rl` has it"]),
        (AlignConfig, "--loss.type", "sigmoid", ['loss.type = "dpo"']),
        (TrainerConfig, "--loss.type", "grop", ["did you mean 'grpo'?"]),
    ],
)
def test_algorithms_that_are_no_value(refusal, rl_toml: str, cls, option: str, value: str, expected) -> None:
    base = {RLConfig: ("@", rl_toml), AlignConfig: ROWS, TrainerConfig: ("--model.name", "m")}[cls]
    message = refusal(*base, option, value, cls=cls)
    assert f"= {value!r} is not valid; " in message
    for part in expected:
        assert part in message


def test_layers_that_hints_name_are_there() -> None:
    hints = [hint for algorithms in ALGORITHMS.values() for hint in algorithms.values()]
    paths = {word for hint in hints for word in hint.split() if word.endswith(".toml")}
    assert len(paths) >= 4 and all((ROOT / path).is_file() for path in paths)
