"""`rl --stop DIR` and `rl --status DIR`: a run from another terminal, or from another machine that sees its directory.

A request to stop is a file in the run directory, which the supervisor looks for: it needs no signal, so it works across
machines, containers and users.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.config.shared import CheckpointConfig
from tandem.launch.supervisor import tail
from tandem.trainer.checkpoints.history import how_to_go_on, is_finished
from tandem.utils.console import Console
from tandem.utils.errors import UserError
from tandem.utils.files import is_number, read_json_lines, read_table
from tandem.utils.findings import Watch
from tandem.utils.log import printable, say
from tandem.utils.manifest import MANIFEST
from tandem.utils.metrics import read_metrics
from tandem.utils.run_content import misshapen
from tandem.utils.run_dir import RunDir, step_name, steps_with
from tandem.utils.run_holder import Holder, is_held, read_holder
from tandem.utils.waiting import Deadline

LOOK_S = 0.5
ENDING_S = 60.0  # for processes to end, besides the time that a checkpoint may take
LOCK = "trainer.lock"
KEY_COLUMNS = 12  # before what a line of the status says


class StopRequest:
    """As the supervisor sees it: whether somebody has asked, looked up twice a second."""

    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = run_dir.stop_request
        self.path.unlink(missing_ok=True)  # of an earlier start
        self._clock = clock
        self._next = clock()

    def is_there(self) -> bool:
        if self._clock() < self._next:
            return False
        self._next = self._clock() + LOOK_S
        return self.path.exists()


def stop_run(root: Path) -> str:
    """Ask for a checkpoint and the end, and wait for it. Returns what became of the run."""
    run_dir = require_run(root)
    holder = running(run_dir)
    if holder is None:
        return f"nothing runs in {root}; {_ended(run_dir)}"
    if holder.command != "rl":
        raise UserError(f"--stop {root}: it is run by {holder.describe()}; `rl --stop` is for runs of `rl`")
    deadline = Deadline(f"the run in {root} to end", _saving_s(run_dir) + ENDING_S, f"it is {holder.describe()}")
    while (left := read_holder(run_dir.root / LOCK)) is not None and left.token == holder.token:
        if holder.is_on_this_machine() and not holder.is_alive():
            break
        run_dir.stop_request.touch()  # again and again: one that is just starting removes those that it finds
        deadline.check()
        time.sleep(LOOK_S / 5)
    return f"stopped {root}; {_ended(run_dir)}"


def print_status(console: Console, root: Path) -> None:
    first, *others = status_lines(root)
    say(first)  # it may end with a command to copy, and stays in one piece
    for line in others:
        console.print_line(line[:KEY_COLUMNS], line[KEY_COLUMNS:])


def status_lines(root: Path) -> list[str]:
    """What `--status` prints."""
    run_dir = require_run(root)
    holder = running(run_dir)
    max_steps = _max_steps(run_dir)
    if (damage := misshapen(root)) is None:
        told = [f"{root}: {_state(run_dir, max_steps, holder)}", *_progress_lines(run_dir, max_steps)]
    else:
        state = "not running" if holder is None else _running(holder)
        told = [f"{root}: {state}", f"damaged     {damage}"]
    if holder is not None:
        told += _last_words(run_dir)
    return [*told, f"logs        {run_dir.root / 'logs'}"]


def _last_words(run_dir: RunDir) -> list[str]:
    """What each process of a run that goes on has said last."""
    logs = sorted((run_dir.root / "logs").glob("*.log"))
    return [f"now         {log.stem}: {printable(line)}" for log in logs for line in tail(log, 1)]


def _progress_lines(run_dir: RunDir, max_steps: int) -> list[str]:
    lines = read_metrics(run_dir)
    step = max((line["step"] for line in lines if line["process"] == "trainer"), default=0)
    rewards = _numbers(lines, "reward/mean")
    times = [_moment(line.get("time")) for line in lines]
    signs = [moment for moment in times if moment is not None]
    told = [f"step        {step} of {max_steps}"]
    if rewards:
        told.append(f"reward      {rewards[-1]:.3f} (first {rewards[0]:.3f})")
    if signs:
        told.append(f"last sign   {signs[-1]}")
    checkpoints = steps_with(run_dir.checkpoints, MANIFEST)
    told.append(f"checkpoint  {step_name(checkpoints[-1]) if checkpoints else 'none yet'}")
    events = [event for event in read_json_lines(run_dir.events) if event.get("event") in ("restarted", "failed")]
    told += [f"{finding.severity:<10}  {finding}" for finding in Watch(lines).current]
    for event in events:
        told.append(f"{event['event']:<10}  {event.get('who')} ({event.get('why')})")
    if len(signs) < len(times):
        told.append(
            f"damaged     {run_dir.metrics}: {len(times) - len(signs)} of {len(times)} lines have no valid time"
        )
    return told


def require_run(root: Path) -> RunDir:
    run_dir = RunDir(root)
    if not (run_dir.config / "rl.json").is_file():
        raise UserError(f"{str(root)!r} is not the directory of a run of `rl`: there is no config/rl.json in it")
    return run_dir


def running(run_dir: RunDir) -> Holder | None:
    """Who runs it, if anybody does."""
    path = run_dir.root / LOCK
    holder = read_holder(path)
    return holder if holder is not None and is_held(path, holder) else None


def _max_steps(run_dir: RunDir) -> int:
    path = run_dir.config / "rl.json"
    max_steps = read_table(path).get("max_steps")
    if type(max_steps) is not int:
        raise UserError(f"{path} is damaged: max_steps = {max_steps!r}; the command of the run is in command.txt")
    return max_steps


def _saving_s(run_dir: RunDir) -> float:
    """How long the run may take for its last checkpoint; where its configuration is damaged, as long as others."""
    try:
        stored = read_table(run_dir.config / "rl.json").get("checkpoint", {})
        return CheckpointConfig.model_validate(stored).on_signal_timeout_s
    except ValueError:
        return CheckpointConfig().on_signal_timeout_s


def _numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [value for line in lines if is_number(value := line.get(name))]


def _moment(value: Any) -> str | None:
    """Seconds since 1970 as people read them; None if they are no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if is_number(value) else None
    except (OverflowError, ValueError, OSError):
        return None


def _state(run_dir: RunDir, max_steps: int, holder: Holder | None) -> str:
    if holder is not None:
        return _running(holder)
    if is_finished(run_dir, ("orchestrator", "trainer"), max_steps):
        return "finished"
    return f"not running; {how_to_go_on(run_dir, 'rl')}"


def _running(holder: Holder) -> str:
    return f"running, `{holder.command}` (pid {holder.pid} on {holder.host}, since {holder.since})"


def _ended(run_dir: RunDir) -> str:
    if (damage := misshapen(run_dir.root)) is not None:
        return f"it is damaged: {damage}"
    is_done = is_finished(run_dir, ("orchestrator", "trainer"), _max_steps(run_dir))
    return "it is finished" if is_done else how_to_go_on(run_dir, "rl")
