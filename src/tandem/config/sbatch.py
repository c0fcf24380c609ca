"""The options of SLURM's sbatch: their names, and what they say of nodes and GPUs."""

import re
from collections.abc import Mapping
from typing import Any

from tandem.utils.spelling import nearest

# Long names, as `man sbatch` lists them (22.05 to 25.05).
_NAMES = """
account acctg-freq batch bb bbf begin bell chdir cluster-constraint clusters comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid
gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input
job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
network nice no-bell no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe partition power prefer
priority profile propagate qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node
spread-job stepmgr switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
use-min-nodes verbose wait-all-nodes wckey x11
"""
OPTIONS = frozenset(_NAMES.split())
# Those that take no value, and those that may go without one.
_FLAGS = """
bell contiguous hold ignore-pbs no-bell no-requeue overcommit oversubscribe quiet reboot requeue spread-job stepmgr
use-min-nodes verbose
"""
FLAGS = frozenset(_FLAGS.split())
_EITHER = """
exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports x11
"""
WITH_OR_WITHOUT = frozenset(_EITHER.split())
LINE_ENDS = ("\n", "\r", "\0")
# Options of sbatch that decide what is submitted, or how it answers: that is done here.
OURS = {
    "array": "the runs of a sweep are one array: --max-jobs limits how many run at once",
    "wrap": "the job script is written for you",
    "parsable": "job ids are read and stored for you",
    "test-only": "--dry-run writes the script and submits nothing",
    "wait": "--status shows how far a sweep is",
}


def sbatch_name(name: str) -> str:
    """The long name of an option, given with - or _. Raises ValueError for one that sbatch does not have."""
    option = name.replace("_", "-")
    if option in OURS:
        raise ValueError(f"{name!r} is not yours to set: {OURS[option]}")
    if option not in OPTIONS:
        near = nearest(option, OPTIONS)
        hint = f"did you mean {near!r}?" if near else "`man sbatch` lists all of them"
        raise ValueError(f"sbatch has no option {name!r}; {hint}")
    return option


def sbatch_value(option: str, value: Any) -> str | int | float:
    """As sbatch gets it; of a flag, whether it is given. Raises ValueError for what cannot stand in a job script."""
    bare = FLAGS | WITH_OR_WITHOUT
    if option in bare and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if option in FLAGS:
        raise ValueError(f"{option} = {value!r}: sbatch takes no value for it; give true or false")
    if isinstance(value, bool):
        raise ValueError(f"{option} needs a value, and {str(value).lower()} is none; give a number or a quoted text")
    if not isinstance(value, str | int | float):
        raise ValueError(f"{option} = {value!r} is not one value; give a number or a text")
    if not is_one_line(str(value)):
        raise ValueError(f"{option} = {value!r} has a line break, which would break the job script; leave it out")
    return value


def is_one_line(text: str) -> bool:
    return not any(sign in text for sign in LINE_ENDS)


def gpus_per_node(options: Mapping[str, str], num_nodes: int) -> int:
    """GPUs of a node by whichever option asks for them; 0: the job asks for none."""
    if "gpus-per-node" in options:
        return _count(options["gpus-per-node"])
    if "gpus" in options:
        return _count(options["gpus"]) // num_nodes
    found = [part for part in options.get("gres", "").split(",") if part.startswith(("gpu", "gres/gpu"))]
    return sum(map(_count, found))


def _count(text: str) -> int:
    """Of `4`, `a100:4`, `gpu:4`, `gpu:a100:4(S:0-1)`; a name alone is one."""
    last = text.partition("(")[0].rpartition(":")[2].strip()
    return int(last) if re.fullmatch(r"\d+", last) else 1
