"""What is refused before a process is started."""

import shutil
import socket
from pathlib import Path

import pytest

from tandem.launch import preflight
from tandem.launch.provenance import write_run_config
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, read_json_lines, write_json
from tandem.utils.manifest import write_manifest


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def good(make_config, tiny_model: Path, free_port: int):
    """A configuration with nothing wrong, but for what a test adds."""

    def make(**options):
        orchestrator = {"env": {"args": {"num_train": 4, "num_eval": 2}}} | options.pop("orchestrator", {})
        tree = {"model": {"name": tiny_model}, "inference": {"server": {"port": free_port}}}
        return make_config(**(tree | {"orchestrator": orchestrator} | options))

    return make


def test_a_good_configuration_starts_at_zero(good) -> None:
    assert preflight.check(good()) == 0


@pytest.mark.parametrize("name", ["kl", "teacher"])
def test_reference_and_teacher_models(name: str, good, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "other")
    (folder / "tokenizer.json").unlink()
    options = {"trainer": {"loss": {name: {"coef": 0.1, "model": folder}}}}
    described = read_json(folder / "config.json")
    assert preflight.check(good(**options)) == 0
    for change, message in (
        ({"vocab_size": 5}, r"has vocab_size = 5, less than the \d+ tokens of the model that is trained; give"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type = 'yarn' is not supported"),
    ):
        write_json(folder / "config.json", described | change)
        with pytest.raises(UserError, match=rf"^trainer\.loss\.{name}\.model = '.*other'.* {message}"):
            preflight.check(good(**options))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=rf"^trainer\.loss\.{name}\.model = '.*other' holds no model"):
        preflight.check(good(**options))


def test_another_run(good, tmp_path: Path) -> None:
    (tmp_path / "run" / "weights" / "step_000000").mkdir(parents=True)
    write_run_config(tmp_path / "run" / "config", {})
    with pytest.raises(UserError, match="holds another run"):
        preflight.check(good())
    assert preflight.check(good(clean=True)) == 0


def test_resuming(good, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resume: output_dir = .* holds no complete checkpoint"):
        preflight.check(good(resume=True))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000006"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, 6)
    assert preflight.check(good(resume=True, max_steps=7)) == 6
    assert preflight.check(good(resume=True, max_steps=6)) == 6  # what is missing after the last step is made
    with pytest.raises(UserError, match="is at step 6, but max_steps = 5; raise max_steps"):
        preflight.check(good(resume=True, max_steps=5))


def test_resuming_another_run(good, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000006"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, 6)
    write_json(tmp_path / "run" / "config" / "rl.json", good(seed=1).model_dump(mode="json"))
    assert preflight.check(good(resume=True, seed=1)) == 6
    with pytest.raises(UserError, match=r"seed = 1 → 2; give the old values, or continue anyway with --allow-changes"):
        preflight.check(good(resume=True, seed=2))
    assert preflight.check(good(resume=True, seed=2, allow_changes=True)) == 6
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["event"], event["step"], event["changes"]["seed"]) == ("options_changed", 6, [1, 2])


def test_a_model_that_is_not_there(good, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere' is not a directory"):
        preflight.check(good(model={"name": tmp_path / "nowhere"}))


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_directory_without_its_files(good, tiny_model: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(UserError, match=rf"model\.name = .* there is no {missing} in it"):
        preflight.check(good(model={"name": tmp_path / "model"}))


def test_an_architecture_that_only_transformers_knows(good, tiny_model: Path, tmp_path: Path, free_port: int) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = read_json(tmp_path / "model" / "config.json")
    write_json(tmp_path / "model" / "config.json", config | {"architectures": ["Olmo2ForCausalLM"]})
    advice = {  # the trainer cannot; the native engine cannot, whatever trains it
        "native": "Train others with model.impl = 'hf' and serve them with engine = 'vllm'",
        "hf": "model.impl is for training; serve it with inference.engine = 'vllm'",
    }
    for impl, told in advice.items():
        with pytest.raises(UserError, match=f"'Olmo2ForCausalLM' .* {told}"):
            preflight.check(good(model={"name": tmp_path / "model", "impl": impl}))
    vllm = {"engine": "vllm", "vllm": {"python": tmp_path / "nowhere"}, "server": {"port": free_port}}
    with pytest.raises(UserError, match=r"vllm\.python"):  # as far as that it goes
        preflight.check(good(model={"name": tmp_path / "model", "impl": "hf"}, inference=vllm))


def test_models_that_need_code_of_their_own(good, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "odd")
    described = {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config"}}
    write_json(folder / "config.json", read_json(folder / "config.json") | described)
    teacher = {"loss": {"teacher": {"coef": 0.1, "model": folder}}}
    for model, trainer, option in ((folder, {}, "model.name"), (tiny_model, teacher, "trainer.loss.teacher.model")):
        with pytest.raises(UserError, match=rf"^{option} = '.*odd' needs the Python code .* --model.trust-remote-code"):
            preflight.check(good(model={"name": model, "impl": "hf"}, trainer=trainer))


def test_an_adapter_is_no_model(good, tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {})
    with pytest.raises(UserError, match="is a LoRA adapter; give the model it belongs to"):
        preflight.check(good(model={"name": tmp_path}))


def test_prompts_longer_than_seq_len(good) -> None:
    with pytest.raises(UserError, match=r"seq_len = 20 is too short: .* the smallest seq_len that fits is 21"):
        preflight.check(good(seq_len=20, orchestrator={"sampling": {"max_tokens": 5}}))


def test_an_environment_that_cannot_score(good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "untried.py").write_text(
        "from tandem.envs.reverse_text import ReverseText\n"
        "class Untried(ReverseText):\n"
        "    def score(self, task, completion):\n"
        "        return completion[0] == task.answer[0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"id": "untried:Untried", "args": {"num_train": 4, "num_eval": 2}}
    expected = r"scoring an empty completion of training task 2 failed: IndexError: .* \(untried\.py:4 in score\)"
    with pytest.raises(UserError, match=expected):
        preflight.check(good(orchestrator={"env": env}))
    assert preflight.check(good(orchestrator={"env": env | {"check": False}})) == 0


def test_more_tokens_than_the_model_has_positions(good) -> None:
    assert preflight.check(good(seq_len=512)) == 0
    with pytest.raises(UserError, match=r"seq_len = 513 is above max_position_embeddings = 512"):
        preflight.check(good(seq_len=513))


def test_a_port_in_use(good) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"inference\.server\.port = {port} cannot be bound on .*; port \d+ is free"
        ):
            preflight.check(good(inference={"server": {"port": port}}))


def test_a_key_variable_that_is_not_set(good, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="'NO_SUCH_KEY' names an environment variable that is not set"):
        preflight.check(good(inference={"server": {"port": free_port, "api_key_var": "NO_SUCH_KEY"}}))


def test_a_port_is_taken_for_the_server_and_kept(good, free_port: int) -> None:
    taken = preflight.take_ports(good())
    with taken["inference"], pytest.raises(UserError, match=rf"port = {free_port} cannot be bound"):
        preflight.take_ports(good())
    client = {"base_url": f"http://127.0.0.1:{free_port}"}
    assert preflight.take_ports(good(inference=None, orchestrator={"client": client})) == {}


def test_a_server_that_does_not_answer(good, free_port: int) -> None:
    client = {"base_url": f"http://127.0.0.1:{free_port}"}
    with pytest.raises(UserError, match=rf"base_url = 'http://127\.0\.0\.1:{free_port}': no inference server answers"):
        preflight.check(good(inference=None, orchestrator={"client": client}))
