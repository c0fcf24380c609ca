"""A real SLURM on one machine: slurmctld and three slurmd, each a node with four CPUs and four GPUs that are none.

Everything lies in a folder of its own, listens on ports of its own, and ends with the fixture, by its pid.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import PATIENCE
from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
NODES = ("n1", "n2", "n3")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
KillWait=60
CompleteWait=0
MaxArraySize=6
GresTypes=gpu
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 Gres=gpu:4\n"
PARTITION = "PartitionName=debug Nodes=ALL Default=YES MaxTime=02:00:00 State=UP\n"


def why_no_slurm() -> str | None:
    """Why there can be no cluster here; None if there can."""
    # Debian keeps daemons where a user's path does not lead.
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"SLURM is not installed ({missing[0]}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "a SLURM of one's own needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s * PATIENCE,
            check=False,
        )

    def jobs(self) -> dict[str, str]:
        """States of all jobs that SLURM still knows, tasks of arrays one by one."""
        listed = self.run("squeue", "--array", "--noheader", "--states=all", "--format=%i %T")
        assert listed.returncode == 0, listed.stderr
        return dict(line.split() for line in listed.stdout.splitlines())

    def wait(self, jobs: Sequence[str], timeout_s: float, logs: Path) -> None:
        """Until none of them waits or runs; whatever they printed is shown when that takes too long."""
        deadline = time.monotonic() + timeout_s * PATIENCE
        while under_way := [job for job in jobs if self.jobs().get(job, "") in ("PENDING", "RUNNING", "COMPLETING")]:
            assert time.monotonic() < deadline, f"{under_way} are not over: {self.jobs()}\n{printed(logs)}"
            time.sleep(0.5)

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        with log:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )


def printed(folder: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(folder.rglob("*.out")))


@contextmanager
def make_cluster() -> Iterator[Cluster]:
    # A short path: sockets have at most 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="tandem-slurm-"))
    environment = dict(os.environ) | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": _path()}
    cluster = Cluster(folder, environment)
    try:
        _configure(folder)
        _start_all(cluster)
        yield cluster
    finally:
        cluster.run("scancel", "--state=PENDING", "--state=RUNNING", "--full")
        for daemon in reversed(cluster.daemons):
            daemon.terminate()
        for daemon in reversed(cluster.daemons):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)  # as munged wants it
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    gpus = [folder / f"gpu{number}" for number in range(4)]
    for gpu in gpus:  # plain files would leave CUDA_VISIBLE_DEVICES empty
        subprocess.run(["mknod", str(gpu), "c", "1", "3"], check=True)
    host = socket.gethostname().partition(".")[0]
    nodes = "".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, port=free_port()) + nodes + PARTITION)
    (folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-3]\n")


def _start_all(cluster: Cluster) -> None:
    at = cluster.folder
    files = [f"--{name}-file={at}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    cluster.start("munged", "munged", "--foreground", "--force", f"--socket={at}/munge.socket", *files)
    _wait_until(lambda: (at / "munge.socket").exists(), cluster, "munged")
    cluster.start("slurmctld", "slurmctld", "-D", "-c")
    for node in NODES:
        cluster.start(f"slurmd-{node}", "slurmd", "-D", "-c", "-N", node)

    def are_idle() -> bool:
        listed = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return listed.stdout.split() == [word for node in NODES for word in (node, "idle")]

    _wait_until(are_idle, cluster, "idle nodes")


def _wait_until(condition, cluster: Cluster, what: str) -> None:
    deadline = time.monotonic() + 30 * PATIENCE
    while not condition():
        alive = all(daemon.poll() is None for daemon in cluster.daemons)
        logs = "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in cluster.folder.glob("*.[lo][ou][gt]"))
        assert alive and time.monotonic() < deadline, f"waited for {what}:\n{logs}"
        time.sleep(0.2)
