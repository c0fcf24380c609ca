"""The run directory: what is a run, what may be deleted."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.damages import damage

from tandem.launch.provenance import write_run_config
from tandem.utils import run_content
from tandem.utils.errors import UserError
from tandem.utils.files import remove
from tandem.utils.metrics import RunLog
from tandem.utils.run_content import misshapen
from tandem.utils.run_dir import (
    RUN_CONTENT,
    RunDir,
    remove_old_steps,
    step_name,
    step_of,
    step_of_samples,
    steps_with,
)
from tandem.utils.run_lock import hold_run

# What a run leaves, by all that it can be told to do; folders end with a slash.
OF_A_RUN = (
    *("config/rl.json", "config/inference_0.json", "config/orchestrator.json", "config/trainer_rank_1.json"),
    *("config/servers.txt", "logs/trainer.log", "logs/inference_1.log", "logs/engine_0/", "dry_run/plan.json"),
    *("metrics.jsonl", "events.jsonl", "failures.jsonl", "reference.safetensors", "stop"),
    *("rollouts/step_000001/", "rollouts/.step_000002.7.tmp/", "checkpoints/step_000001/", "weights/step_000001/"),
    *("checkpoints/.step_000001.removed.tmp/", "weights/announced.json", "merged/step_000001/"),
    *("adapter/step_1000000/", "samples/step_000001.jsonl", "samples/eval_my_maths_step_000001.jsonl"),
    *("samples/.step_000002.jsonl.7.tmp", "tensorboard/events.out.tfevents.1.host", "wandb/run-2025_1-abc/"),
)
# What people keep in folders of the same names.
OF_A_USER = (
    *("config/mine.toml", "config/models.json", "config/rl.toml", "logs/notes.txt", "logs/mine.log", "dry_run/a.txt"),
    *("samples/mine.tmp", "weights/.step_000001.mine.tmp", "checkpoints/step_٠٠٠٠١٢/"),
    *("samples/golden.jsonl", "samples/step_1.jsonl", "samples/step_000001.txt", "checkpoints/mine.pt"),
    *("checkpoints/step_000001.pt", "checkpoints/step_7/", "weights/model.safetensors", "rollouts/1.json"),
    *("merged/model.bin", "adapter/notes", "tensorboard/mine/", "wandb/run-2025_1-xyz/", "wandb/settings", "notes.txt"),
)


def make(path: Path, content: str | None = "mine") -> None:
    """A file; without content, or with a name that ends with a slash, a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if content is None else path.write_text(content)


def make_all(root: Path, names: Sequence[str]) -> None:
    for name in names:
        make(root / name, None if name.endswith("/") else "mine")


def listed(root: Path) -> list[str]:
    """Files and empty folders below, as the names above."""
    leaves = [path for path in root.rglob("*") if not path.is_dir() or path.is_symlink() or not any(path.iterdir())]
    return sorted(f"{path.relative_to(root)}{'/' * (path.is_dir() and not path.is_symlink())}" for path in leaves)


def test_paths_by_hand(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.log("trainer") == tmp_path / "logs" / "trainer.log"
    assert run_dir.samples(12) == tmp_path / "samples" / "step_000012.jsonl"
    assert run_dir.eval_samples(3) == tmp_path / "samples" / "eval_step_000003.jsonl"


@pytest.mark.parametrize("entry", RUN_CONTENT)
def test_another_run_is_refused_unless_it_is_resumed_or_deleted(tmp_path: Path, entry: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.refuse_another_run(resume=False, clean=False)
    make_all(tmp_path, [entry if "." in entry else f"{entry}/step_000001/"])
    message = r"output_dir = '.*' holds another run; continue it \(--resume\), delete it \(--clean\), or choose"
    with pytest.raises(UserError, match=message):
        run_dir.refuse_another_run(resume=False, clean=False)
    run_dir.refuse_another_run(resume=True, clean=False)
    write_run_config(run_dir.config, {})
    run_dir.refuse_another_run(resume=False, clean=True)


def test_a_dry_run_or_other_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "dry_run").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    RunDir(tmp_path).refuse_another_run(resume=False, clean=False)


def test_resume_and_clean_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume and clean exclude each other"):
        RunDir(tmp_path).refuse_another_run(resume=True, clean=True)


def test_a_name_that_is_too_long_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"output_dir = '.*' cannot be used: File name too long; choose another"):
        RunDir(tmp_path / ("a" * 300)).refuse_another_run(resume=False, clean=False)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("no text", "a file"),
        ("pipe", "neither a file nor a folder"),
        ("dangling link", "a link that leads nowhere"),
        ("link to itself", "a link that leads nowhere"),
    ],
)
def test_what_is_no_directory_is_no_run_directory(tmp_path: Path, kind: str, told: str) -> None:
    damage(tmp_path / "out", kind)
    with pytest.raises(UserError, match=rf"output_dir = '.*out' is {told}; give a directory"):
        RunDir(tmp_path / "out").refuse_another_run(resume=False, clean=False)
    with (
        pytest.raises(UserError, match=rf"output_dir = '.*out' is {told}; give a directory"),
        hold_run(tmp_path / "out", "trainer"),
    ):
        pass


def test_clean_removes_the_run_and_leaves_the_rest(tmp_path: Path) -> None:
    """What is not a run's stays, in whichever folder."""
    run_dir = RunDir(tmp_path)
    run_dir.create()
    make_all(tmp_path, OF_A_RUN + OF_A_USER)
    write_run_config(run_dir.config, {})
    for name in ("latest", ".latest.tmp"):
        (run_dir.weights / name).symlink_to("step_000001")
    (run_dir.config / "wandb_id.txt").write_text("abc")
    (tmp_path / "wandb" / "latest-run").symlink_to("run-2025_1-abc")
    run_dir.refuse_another_run(resume=False, clean=True)
    run_dir.clean()
    assert listed(tmp_path) == sorted(OF_A_USER)
    run_dir.clean()
    RunDir(tmp_path / "nowhere").clean()


def test_clean_leaves_no_empty_folder(tmp_path: Path) -> None:
    make_all(tmp_path, [name for name in OF_A_RUN if not name.startswith("wandb")])
    write_run_config(RunDir(tmp_path).config, {})
    RunDir(tmp_path).clean()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["rollouts", "weights", "checkpoints", "samples", "logs"])
def test_clean_follows_a_link_to_another_disk(tmp_path: Path, folder: str) -> None:
    run_dir, scratch = RunDir(tmp_path / "run"), tmp_path / "scratch"
    make_all(scratch, ["notes.txt"])
    run_dir.root.mkdir()
    (run_dir.root / folder).symlink_to(scratch)
    make_all(run_dir.root, OF_A_RUN)
    write_run_config(run_dir.config, {})
    run_dir.clean()
    assert listed(run_dir.root) == sorted([folder, "wandb/run-2025_1-abc/"])
    assert listed(scratch) == ["notes.txt"] and (run_dir.root / folder).is_symlink()


@pytest.mark.parametrize("tells", ["versions", "events", "latest"])
def test_a_deletion_that_is_cut_short_can_be_repeated(
    tmp_path: Path, tells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is cut: what tells whose the directory is goes last."""

    class Killed(BaseException):
        pass

    removed: list[Path] = []

    def remove_some(path: Path) -> None:
        if len(removed) == most:
            raise Killed
        removed.append(path)
        remove(path)

    monkeypatch.setattr(run_content, "remove", remove_some)
    most = 0
    for most in range(len(OF_A_RUN) + 3):
        removed.clear()
        run_dir = RunDir(tmp_path / str(most))
        make_all(run_dir.root, [name for name in OF_A_RUN if not name.startswith("wandb")])
        if tells == "versions":
            write_run_config(run_dir.config, {})
        elif tells == "events":
            RunLog(run_dir, "trainer").event("started")
            run_dir.events.write_text(run_dir.events.read_text().removeprefix("mine\n"))
        else:
            (run_dir.weights / "latest").symlink_to("step_000001")
        try:
            run_dir.clean()
        except Killed:
            assert len(removed) == most
        run_dir.refuse_another_run(resume=False, clean=True)
    assert len(removed) < most, "the last of them was not cut"


@pytest.mark.parametrize("name", [name for name in OF_A_RUN if name.split("/")[0] in ("config", "samples", "stop")])
def test_what_a_run_would_overwrite_is_refused_where_no_run_wrote(tmp_path: Path, name: str) -> None:
    make_all(tmp_path, [name])
    for clean in (False, True):
        with pytest.raises(UserError, match=rf"has '{name}', which no run wrote and a run would overwrite; choose"):
            RunDir(tmp_path).refuse_another_run(resume=False, clean=clean)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("checkpoints", "checkpoints is a file, and a run has a folder there; move it away"),
        ("config/rl.json/", r"config/rl\.json is a folder, and a run has a file there"),
        ("logs/trainer.log/", r"logs/trainer\.log is a folder"),
        ("metrics.jsonl/", r"metrics\.jsonl is a folder"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str, told: str, resume: bool) -> None:
    make_all(tmp_path, [name])
    with pytest.raises(UserError, match=told):
        RunDir(tmp_path).refuse_another_run(resume=resume, clean=not resume)


@pytest.mark.parametrize("name", ["samples", "events.jsonl", "config/trainer.json"])
@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path, name: str, target: str) -> None:
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(link if target == "itself" else target)
    with pytest.raises(UserError, match=f"{name} is a link that leads nowhere, and a run has a f"):
        RunDir(tmp_path).refuse_another_run(resume=False, clean=False)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match=r"events\.jsonl is neither a file nor a folder"):
        RunDir(tmp_path).refuse_another_run(resume=False, clean=False)


def test_what_a_run_deletes_meanwhile_is_not_misshapen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again looks at the directory while the orchestrator deletes old batches."""
    (tmp_path / "rollouts").mkdir()
    listed = lambda folder, _: [folder / step_name(1)]  # noqa: E731
    monkeypatch.setattr(run_content, "_named", listed)
    assert misshapen(tmp_path) is None
    (tmp_path / "rollouts" / step_name(1)).symlink_to("nowhere")
    assert misshapen(tmp_path) is not None


def test_step_names() -> None:
    assert step_name(12) == "step_000012"
    assert step_of(Path("a/step_000012")) == 12
    assert step_of(Path("step_1234567")) == 1234567
    for name in ("latest", "step_", "step_x", ".step_000012.7.tmp", "eval_step_000012", "step_000012.jsonl"):
        assert step_of(Path(name)) is None, name
    for name in ("step_²", "step_12", "step_٠٠٠٠١٢", "step_0000012"):
        assert step_of(Path(name)) is None, f"{name} is not where step_name leads"


def test_steps_of_samples() -> None:
    for name in ("step_000012.jsonl", "eval_step_000012.jsonl", "eval_my_step_3_step_000012.jsonl"):
        assert step_of_samples(Path(name)) == 12, name
    for name in ("step_000012", "golden.jsonl", "my_step_000012.jsonl", "eval_step_12.jsonl", "step_000012.json"):
        assert step_of_samples(Path(name)) is None, name


def test_steps_with_a_marker_are_in_order(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        (tmp_path / step_name(step)).mkdir()
        if step != 2:
            (tmp_path / step_name(step) / "done").touch()
    assert steps_with(tmp_path, "done") == [1, 10]
    assert steps_with(tmp_path / "nowhere", "done") == []


def test_old_steps_are_removed(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000003", "notes"):
        (tmp_path / name).mkdir()
    remove_old_steps(tmp_path, keep_from=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000003"]
    remove_old_steps(tmp_path / "nowhere", keep_from=3)


@pytest.mark.parametrize("entry", ["config/site.yaml", "logs/mine.log", "samples/a.txt", "wandb/key"])
def test_clean_leaves_what_no_run_wrote(tmp_path: Path, entry: str) -> None:
    mine = tmp_path / entry
    mine.parent.mkdir()
    mine.touch()
    run_dir = RunDir(tmp_path)
    run_dir.refuse_another_run(resume=False, clean=True)
    run_dir.clean()
    assert mine.exists()


@pytest.mark.parametrize("entry", ["checkpoints/mine.pt", "weights/model.bin", "rollouts/1.json"])
def test_what_no_run_wrote_and_stands_in_its_place_is_refused(tmp_path: Path, entry: str) -> None:
    mine = tmp_path / entry
    mine.parent.mkdir()
    mine.touch()
    told = rf"has '{mine.parent.name}', which no run wrote, and --clean deletes only runs"
    with pytest.raises(UserError, match=told):
        RunDir(tmp_path).refuse_another_run(resume=False, clean=True)
    RunDir(tmp_path).clean()
    assert mine.exists()
