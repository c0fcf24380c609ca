"""Job scripts: options, roles, where a job begins, and templates of a site."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.patience import PATIENCE

from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.config.base import load_config
from tandem.config.sbatch import gpus_per_node
from tandem.config.slurm import SlurmConfig
from tandem.launch.plan import make_plan
from tandem.launch.slurm import srun
from tandem.launch.slurm.job import JOB, SITE_TEMPLATES, Job, in_job, render
from tandem.launch.slurm.nodes import lay_over_nodes, on_this_node
from tandem.launch.slurm.submission import is_to_be_submitted, submit_evaluation, submit_run
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, write_json


def make_job(tmp_path: Path, command: str = "sft", slurm: dict[str, Any] | None = None, **values: Any) -> Job:
    options = SlurmConfig.model_validate(slurm or {})
    return Job("mine", command, tmp_path / "config.json", tmp_path, options, run=tmp_path / "a run", **values)


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., Path]:
    """A folder of programs, each a few lines of bash, in place of those that a job script calls."""

    def write(**texts: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        return folder

    return write


AS_SRUN = f'case "$2" in {srun.MODULE}) exec srun "$@";; esac'
TWO_NODES = 'case "$2" in hostnames) echo a; echo b;; *) echo "NodeAddr=10.0.0.$(tr ab 12 <<< "$3")";; esac'


def run_script(job: Job, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    script = job.folder / "job.sh"
    script.write_text("\n".join(line for line in render(job).splitlines() if not line.startswith("source ")))
    environment = variables | {"PATH": f"{programs}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False, timeout=60 * PATIENCE
    )


def test_options_of_sbatch_pass_through_and_others_are_computed(tmp_path: Path) -> None:
    given = {"account": "bsc88", "cpus_per_task": 80, "gres": "gpu:4", "exclusive": True, "time": "2:00:00"}
    script = render(make_job(tmp_path, slurm=given))
    header = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert header == [
        *("--job-name=mine", f"--output={tmp_path}/slurm-%j.out", "--open-mode=append", "--signal=B:USR1@120"),
        *("--requeue", "--nodes=1", "--account=bsc88", "--cpus-per-task=80", "--gres=gpu:4", "--exclusive"),
        "--time=2:00:00",
    ]


def test_what_has_spaces_is_quoted(tmp_path: Path) -> None:
    script = render(make_job(tmp_path, slurm={"comment": "two words", "output": "/my logs/%j.out"}))
    assert "#SBATCH --comment='two words'\n" in script and "#SBATCH --output='/my logs/%j.out'\n" in script


def test_secrets_have_no_place_in_a_script_that_all_can_read() -> None:
    SlurmConfig.model_validate({"export": "ALL,HF_TOKEN,OMP_NUM_THREADS=1"})
    with pytest.raises(UserError, match="export holds HF_TOKEN, which all could read") as refused:
        load_config(SFTConfig, ["--slurm.export", "ALL,HF_TOKEN=s3cret"])
    assert "s3cret" not in str(refused.value)


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    script = render(make_job(tmp_path, slurm={"output": "/logs/%j", "no-requeue": True, "signal": "TERM@5"}))
    assert "#SBATCH --output=/logs/%j\n" in script and "#SBATCH --signal=TERM@5\n" in script
    assert "#SBATCH --requeue" not in script and "#SBATCH --no-requeue\n" in script


@pytest.mark.parametrize(
    "given", [{"requeue": False}, {"requeue": "false"}, {"no-requeue": True}, {"no_requeue": "true"}]
)
def test_requeue_is_switched_off(tmp_path: Path, programs: Callable[..., Path], given: dict[str, Any]) -> None:
    """The warning still has the run save a checkpoint."""
    folder = programs(
        scontrol=f'echo "$@" >> {tmp_path}/asked',
        python="trap 'exit 143' TERM; kill -USR1 $PPID; while :; do sleep 0.05; done",
    )
    job = make_job(tmp_path, slurm=given)
    done = run_script(job, folder, SLURM_JOB_ID="77")
    assert done.returncode == 143 and not (tmp_path / "asked").exists(), done.stderr
    header = [line for line in render(job).splitlines() if line.startswith("#SBATCH") and line.endswith("requeue")]
    assert header == ["#SBATCH --no-requeue"]
    evaluation = render(job.changed(command="evaluate", run=None))
    assert "#SBATCH --no-requeue\n" in evaluation and "scontrol requeue" not in evaluation


def test_flags_of_sbatch_have_no_value(tmp_path: Path) -> None:
    given = {"exclusive": "true", "hold": "False", "no-requeue": False, "nice": True, "comment": "true"}
    header = [line for line in render(make_job(tmp_path, slurm=given)).splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --exclusive", "#SBATCH --requeue", "#SBATCH --nice", "#SBATCH --comment=true"} <= {*header}
    assert not [line for line in header if "hold" in line or "no-requeue" in line]
    assert "#SBATCH --exclusive=user\n" in render(make_job(tmp_path, slurm={"exclusive": "user"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"comment": "a\nb"}, r"comment = 'a\\nb' has a line break"),
        ({"time": {"a": 1}}, "time = {'a': 1} is not one value; give a number or a text"),
        ({"mail_type": ["END", "FAIL"]}, "mail-type = .* is not one value"),
        ({"mail-type": True}, "mail-type needs a value, and true is none"),
        ({"requeue": "maybe"}, "requeue = 'maybe': sbatch takes no value for it; give true or false"),
        ({"requeue": True, "no-requeue": True}, "requeue and no-requeue contradict each other"),
    ],
)
def test_values_that_would_break_a_job_script_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SlurmConfig.model_validate(given)


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm(tmp_path: Path) -> None:
    folder = tmp_path / "50%j"
    job = make_job(tmp_path, "rl", {"nodes": 2}, serving=1, inference=tmp_path / "a.json").changed(folder=folder)
    script = render(job)
    assert f"#SBATCH --output={tmp_path}/50%%j/slurm-%j.out\n" in script
    assert f"--output={tmp_path}/50%%j/inference-%N-%t.log" in script.replace("'", "")


def test_a_line_break_does_not_break_a_job_script(tmp_path: Path) -> None:
    assert "\n# two lines\n" in render(make_job(tmp_path, comment=["two\nlines"]))
    with pytest.raises(UserError, match=r"output = .* has a line break, which would break the job script"):
        render(make_job(tmp_path).changed(folder=tmp_path / "two\nlines"))


def test_a_job_ends_where_its_environment_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(render(make_job(tmp_path, slurm={"venv": str(tmp_path / "gone")})).replace("python -m", "echo"))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["rl", "sft", "align", "evaluate"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_scripts_are_bash(tmp_path: Path, command: str, nodes: int) -> None:
    serving = {"serving": 2, "inference": tmp_path / "inference.json"} if command == "rl" and nodes == 3 else {}
    script = tmp_path / "job.sh"
    script.write_text(render(make_job(tmp_path, command, {"nodes": nodes}, ranks_per_node=4, **serving)))
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
    spread = nodes == 3 and command in ("sft", "align")
    assert ("slurm.srun --nodes=3" in script.read_text()) == spread
    assert ("--nnodes=3 --nproc-per-node=4" in script.read_text()) == spread


@pytest.mark.parametrize(
    ("restarts", "checkpoint", "always", "expected"),
    [
        ("0", True, False, ["--clean"]),  # as it was given
        ("1", True, False, ["--resume"]),
        ("1", False, False, ["--clean"]),
        ("0", True, True, ["--resume"]),
    ],
)
def test_where_a_job_begins(tmp_path: Path, restarts: str, checkpoint: bool, always: bool, expected: list[str]) -> None:
    """The script itself is run, with `python` in place of the command."""
    job = make_job(tmp_path, first=["--clean"], always_goes_on=always)
    assert job.run is not None
    (job.run / "config").mkdir(parents=True)
    if checkpoint:
        (job.run / "checkpoints" / "step_000002").mkdir(parents=True)
        (job.run / "checkpoints" / "step_000002" / "manifest.json").touch()
    script = tmp_path / "job.sh"
    script.write_text(render(job).replace("python -m", "echo"))
    environment = {"SLURM_RESTART_COUNT": restarts, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1:] == expected


@pytest.mark.parametrize("name", ["a[1]", "what?", "all*", "{a,b}", "it's"])
def test_a_job_in_a_folder_named_like_a_pattern_goes_on(tmp_path: Path, name: str) -> None:
    job = make_job(tmp_path).changed(run=tmp_path / name)
    assert job.run is not None
    (job.run / "checkpoints" / "step_000002").mkdir(parents=True)
    (job.run / "checkpoints" / "step_000002" / "manifest.json").touch()
    script = tmp_path / "job.sh"
    script.write_text(render(job).replace("python -m", "echo"))
    environment = {"SLURM_RESTART_COUNT": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1:] == ["--resume"]


def test_a_warning_ends_the_command_and_the_job_is_queued_again(tmp_path: Path, programs: Callable[..., Path]) -> None:
    folder = programs(
        scontrol=f'echo "$@" >> {tmp_path}/asked',
        python="trap 'exit 143' TERM; kill -USR1 $PPID; while :; do sleep 0.05; done",
    )
    done = run_script(make_job(tmp_path), folder, SLURM_JOB_ID="77")
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


def test_a_site_changes_a_block_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "job.sh").write_text(
        '{% extends "tandem/job.sh" %}{% block setup %}module load cuda\n{{ super() }}{% endblock %}'
    )
    monkeypatch.setenv(SITE_TEMPLATES, str(site))
    script = render(make_job(tmp_path))
    assert "module load cuda\ncd " in script and " || exit 1\n" in script and "#SBATCH --job-name=mine" in script
    (site / "job.sh").write_text("{{ nothing_of_the_kind }}")
    with pytest.raises(UserError, match="'nothing_of_the_kind' is undefined"):
        render(make_job(tmp_path))
    monkeypatch.setenv(SITE_TEMPLATES, "/nowhere")
    with pytest.raises(UserError, match="is not a directory"):
        render(make_job(tmp_path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"gres": "gpu:4"}, 4),
        ({"gres": "nvme:100,gpu:a100:2(S:0-1)"}, 2),
        ({"gpus-per-node": "h100:8"}, 8),
        ({"gpus": "8"}, 4),
        ({"gres": "gpu"}, 1),
    ],
)
def test_gpus_of_a_node(options: dict[str, str], expected: int) -> None:
    assert gpus_per_node(options, num_nodes=2) == expected


def test_what_sbatch_does_not_have_is_refused() -> None:
    with pytest.raises(ValidationError, match="sbatch has no option 'acount'; did you mean 'account'"):
        SlurmConfig.model_validate({"acount": "x"})
    with pytest.raises(ValidationError, match="inference_nodes = 2 leaves none of nodes = 2 to the trainer"):
        SlurmConfig(nodes=2, inference_nodes=2)


def test_roles_are_laid_over_the_nodes_of_a_job(make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(slurm={"nodes": 3})
    plans = make_plan(config, tmp_path, num_cores=4)
    assert is_to_be_submitted(config.slurm) and lay_over_nodes(plans, config) == plans  # no job
    assert on_this_node(config) is config
    for name, value in {"SLURM_JOB_ID": "5", JOB: "5", "TANDEM_TRAINER_NODES": "a,b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TANDEM_SERVERS", "http://10.0.0.3:11005")
    monkeypatch.setenv("TANDEM_RENDEZVOUS", "10.0.0.1:10005")
    assert in_job() and not is_to_be_submitted(config.slurm)
    here = on_this_node(config)
    orchestrator, trainer = lay_over_nodes(make_plan(here, tmp_path, num_cores=4), here)
    assert trainer.config["threads"] == 4, "no server shares its cores"
    assert orchestrator.config["client"]["base_url"] == "http://10.0.0.3:11005"
    assert orchestrator.config["client"]["api_key_var"] == "TANDEM_API_KEY"
    assert trainer.command[1:4] == ["-m", srun.MODULE, "--nodes=2"] and "--nodelist=a,b" in trainer.command
    assert "--rdzv-endpoint=10.0.0.1:10005" in trainer.command and "--rdzv-backend=static" in trainer.command
    assert trainer.command[-4:] == ["-m", "tandem.entrypoints.trainer", "@", f"{tmp_path}/trainer.json"]


def test_nodes_meet_without_comparing_their_clocks(tmp_path: Path) -> None:
    """As torchrun's other way to meet does: nodes whose clocks differ would start without each other."""
    (started,) = [part for part in render(make_job(tmp_path, slurm={"nodes": 2})).split("\n\n") if "--nnodes=2" in part]
    assert "--rdzv-backend=static --rdzv-endpoint=$TANDEM_RENDEZVOUS " in started


def test_a_script_started_by_hand_runs_its_command_here(
    tmp_path: Path, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_script(make_job(tmp_path), programs(python=f'echo "${{{JOB}-unset}}" >> {tmp_path}/asked'))
    assert done.returncode == 0 and (tmp_path / "asked").read_text() == "\n", done.stderr
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert is_to_be_submitted(SlurmConfig())
    monkeypatch.setenv(JOB, "")
    assert not is_to_be_submitted(SlurmConfig()) and not in_job()
    monkeypatch.setenv("SLURM_JOB_ID", "6")  # of a job that is not ours
    assert is_to_be_submitted(SlurmConfig())


def test_a_job_of_several_nodes_is_not_run_by_hand(tmp_path: Path, programs: Callable[..., Path]) -> None:
    folder = programs(python=f"touch {tmp_path}/ran", scontrol="exit 1")
    done = run_script(make_job(tmp_path, slurm={"nodes": 2}), folder)
    assert done.returncode != 0 and "this is a job of 2 nodes; submit it with sbatch" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_dry_run_writes_the_job_and_submits_nothing(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    arguments = ["--model.name", str(tiny_model), "--data.path", str(rows), "--output-dir", str(tmp_path / "run")]
    config = load_config(SFTConfig, [*arguments, "--epochs", "2", "--slurm.gpus-per-node", "4", "--dry-run"])
    submit_run("sft", config)
    assert "nothing was submitted" in capsys.readouterr().out
    stored = read_json(tmp_path / "run" / "slurm" / "1" / "sft.json")
    assert stored["epochs"] == 2 and stored["parallel"] == {"ranks": 4} and "dry_run" not in stored
    assert "#SBATCH --gpus-per-node=4\n" in (tmp_path / "run" / "slurm" / "1" / "job.sh").read_text()
    assert load_config(SFTConfig, ["@", str(tmp_path / "run" / "slurm" / "1" / "sft.json")]).slurm == config.slurm


def test_what_a_job_would_fail_for_is_refused_before_it_is_submitted(tmp_path: Path, tiny_model: Path) -> None:
    given = [
        "--model.name",
        str(tiny_model),
        "--output-dir",
        str(tmp_path / "run"),
        "--dry-run",
        "--slurm.time",
        "1:00",
    ]
    rows = ["--data.path", str(tmp_path / "no.jsonl")]

    def sft(*more: str) -> None:
        submit_run("sft", load_config(SFTConfig, [*given, *rows, *more]))

    with pytest.raises(UserError, match=r"data.path = .*no.jsonl' does not exist"):
        sft()
    with pytest.raises(UserError, match=r"slurm.inference_nodes = 1 is for `rl`"):
        sft("--slurm.nodes", "2", "--slurm.inference-nodes", "1")
    with pytest.raises(UserError, match=r"resume: output_dir = .* holds no complete checkpoint"):
        sft("--resume")
    with pytest.raises(UserError, match=r"slurm.venv = '/nope' is no virtual environment"):
        sft("--slurm.venv", "/nope")
    sft("--slurm.dependency", "afterok:3", "--model.name", "made_by_job_3")  # and so are its rows

    def evaluate(*more: str) -> None:
        submit_evaluation(load_config(EvaluateConfig, ["--output-dir", str(tmp_path / "eval"), "--dry-run", *more]))

    with pytest.raises(UserError, match="nowhere' is not a directory"):
        evaluate("--model", "nowhere", "--slurm.time", "1:00")
    with pytest.raises(UserError, match=r"env.id = 'revers-text' is not known"):
        evaluate("--model", str(tiny_model), "--env.id", "revers-text", "--slurm.time", "1:00")
    with pytest.raises(UserError, match=r"slurm.venv = '/nope' is no virtual environment"):
        evaluate("--model", str(tiny_model), "--env.id", "reverse-text", "--slurm.venv", "/nope")
    evaluate("--model", "nowhere", "--slurm.dependency", "afterok:3")


def test_a_run_is_not_resumed_with_other_options(
    make_config: Callable[..., RLConfig], tiny_model: Path, tmp_path: Path
) -> None:
    def resumed(**options: Any) -> RLConfig:
        given = {"model": {"name": str(tiny_model)}, "output_dir": str(tmp_path / "run"), "slurm": {"nodes": 2}}
        return make_config(**given, resume=True, dry_run=True, **options)

    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004" / "manifest.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    write_json(tmp_path / "run" / "config" / "rl.json", resumed().model_dump(mode="json"))
    with pytest.raises(UserError, match=r"these options change what the run learns .*seed = 0 → 3"):
        submit_run("rl", resumed(seed=3))
    submit_run("rl", resumed())


def test_one_scheduler_places_a_run(make_config: Callable[..., RLConfig]) -> None:
    with pytest.raises(ValidationError, match=r"slurm.nodes = 2 and ray.address = 'auto' are both given"):
        make_config(slurm={"nodes": 2}, ray={"address": "auto"})


def test_every_gpu_of_a_serving_node_has_a_server(tmp_path: Path, programs: Callable[..., Path]) -> None:
    """The script is run with programs that write down what they are asked."""
    folder = programs(
        scontrol=TWO_NODES,
        srun='while [ "$1" != bash ]; do shift; done; for n in 0 1; do SLURM_LOCALID=$n "$@"; done; exec sleep 100',
        python=f'{AS_SRUN}\necho "$CUDA_VISIBLE_DEVICES $TANDEM_SERVERS $@" >> {tmp_path}/asked',
    )
    serving = {"serving": 1, "servers_per_node": 2, "inference": tmp_path / "inference.json"}
    until = f"while ! grep -q 'port 12007' {tmp_path}/asked; do sleep 0.01; done"
    job = make_job(tmp_path, "rl", {"nodes": 2}, **serving, after=[until])
    done = run_script(job, folder, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="a,b", CUDA_VISIBLE_DEVICES="4,6")
    assert done.returncode == 0, done.stderr
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "entrypoints.inference" in line]
    servers = "http://10.0.0.2:11007,http://10.0.0.2:12007"
    given = f"{servers} -m tandem.entrypoints.inference @ {tmp_path}/inference.json --server.host 0.0.0.0 --server.port"
    assert sorted(asked) == [f"4 {given} 11007", f"6 {given} 12007"]


@pytest.mark.parametrize(("codes", "starts"), [("1 137 0", 3), ("2 0", 1), ("1 1 1 0", 3)])
def test_a_server_that_fails_is_started_again(
    tmp_path: Path, programs: Callable[..., Path], codes: str, starts: int
) -> None:
    """Its n-th start ends with the n-th code; the last one serves until it is told to end. A mistake (2) is final."""
    serve = f"""case "$*" in *entrypoints.rl*) while [ ! -e {tmp_path}/served ]; do sleep 0.01; done; exit;; esac
echo "$$" >> {tmp_path}/starts
codes=({codes}); code=${{codes[$(wc -l < {tmp_path}/starts) - 1]}}
if [ $code -ne 0 ]; then exit $code; fi
trap 'touch {tmp_path}/ended; exit 0' TERM; touch {tmp_path}/served; while :; do sleep 0.01; done"""
    folder = programs(
        scontrol=TWO_NODES,
        srun=f'while [ "$1" != bash ]; do shift; done; "$@" & trap "kill -TERM $!" TERM; wait $!; wait $!; '
        f"touch {tmp_path}/served",
        python=f"{AS_SRUN}\n{serve}",
    )
    job = make_job(
        tmp_path, "rl", {"nodes": 2}, serving=1, inference=tmp_path / "inference.json", delays_s=[0.01, 0.02]
    )
    done = run_script(job, folder, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="a,b", SLURM_LOCALID="0")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "starts").read_text().split()) == starts
    assert (tmp_path / "ended").exists() == (codes == "1 137 0"), "told to end with the job"
    assert done.stderr.count("is started again in 0.0") == starts - 1
