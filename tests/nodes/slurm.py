"""A Slurm cluster of this machine alone: munged, slurmctld and a slurmd, in a folder; needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.cli import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdTimeout=15
KillWait=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={slurmd} CPUs={cpus} RealMemory=1000
PartitionName=low Nodes=node1 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=node1 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """List what a cluster here lacks."""
    found = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return [*found, *["root"] * (os.geteuid() != 0)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node, in partitions `low` and `high`, whose jobs preempt those of `low`. Yields the
    environment of its commands."""
    for name in ("state", "spool-node1"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    facts = {"host": socket.gethostname(), "cpus": os.cpu_count(), "folder": folder}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(ctld=free_port(), slurmd=free_port(), **facts))
    environ = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    places = [f"--{what}-file={folder / what}" for what in ("pid", "log", "seed")]
    daemons = (
        ["munged", "-F", "-f", f"--key-file={key}", f"--socket={folder / 'munge.socket'}", *places],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "node1"],
    )
    with contextlib.ExitStack() as running:
        for command in daemons:
            log = running.enter_context((folder / f"{command[0]}.out").open("wb"))
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.terminate)
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists, seconds=20)
        wait_for(lambda: ask(environ, "sinfo", "-h", "-o", "%T", "-p", "low") == "idle", seconds=60)
        yield environ


def ask(environ: dict[str, str], *command: str) -> str:
    """Run a command of Slurm; return what it prints, also where it fails."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()
