"""Run Slurm on the two nodes of a `harness.Cluster`: munged, slurmctld and two slurmd."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.cli import wait_for
from tests.nodes.harness import REASON, Cluster, run

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "nsenter")
PATH = f"{os.environ['PATH']}:/usr/sbin"
CONF = """
ClusterName=test
SlurmctldHost=control({control})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdTimeout=15
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
{nodes}
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=node[1-2] PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return the reason why Slurm cannot run on this machine, or an empty string if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return REASON or (f"not installed: {', '.join(absent)}" if absent else "")


class Slurm:
    """Commands of a Slurm cluster and the environment of its jobs."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def inside(self, name: str, host: str, *command: str) -> list[str]:
        """Return a command for a network namespace, with a host name and an /etc/hosts with all nodes."""
        # slurmd refuses to start under `ip netns exec`, which hides /sys/fs/cgroup
        script = f'hostname {host} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        space = ["nsenter", f"--net=/run/netns/{name}", "unshare", "-u", "-m"]
        return [*space, "sh", "-c", script, "sh", *command]

    def ask(self, *command: str, **environ: str) -> str:
        """Run a command of Slurm and return its standard output, even if the command fails."""
        where, environ = self.inside(self.cluster.bridge, "control", *command), {**self.environ, **environ}
        done = subprocess.run(where, env=environ, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def start_node(self, number: int) -> subprocess.Popen[bytes]:
        name = self.cluster.names[number]
        return self.start(name, f"node{number + 1}", "slurmd", "-D", "-N", f"node{number + 1}")

    def start(self, name: str, host: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{host}.out").open("ab") as log:
            where = self.inside(name, host, *command)
            process = subprocess.Popen(where, env=self.environ, stdout=log, stderr=log)
        self.cluster.started.append(process)
        return process


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm on two nodes with the partitions `low` and `high`; jobs of `high` preempt jobs of `low`."""
    with Cluster() as cluster:
        control = cluster.address(249)
        run("ip", "-n", cluster.bridge, "addr", "add", f"{control}/24", "dev", "br-data")
        run("ip", "-n", cluster.bridge, "link", "set", "lo", "up")
        hosts = {"localhost": "127.0.0.1", "control": control}
        hosts |= {f"node{k + 1}": cluster.address(k) for k in range(2)}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        nodes = [
            f"NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=2 RealMemory=500"
            for name, address in list(hosts.items())[2:]
        ]
        conf = CONF.format(control=control, folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        controller = Slurm(cluster, folder)
        places = [f"--{what}-file={folder / f'munge.{what}'}" for what in ("pid", "log", "seed", "key")]
        munged = ["munged", "-F", "-f", f"--socket={folder}/munge.socket", *places]
        daemons = [controller.start(cluster.bridge, "control", *munged)]
        wait_for((folder / "munge.socket").exists, seconds=30)
        daemons.append(controller.start(cluster.bridge, "control", "slurmctld", "-D"))
        for k in range(2):
            controller.start_node(k)
        try:
            query = ("sinfo", "-h", "-o", "%T %D", "-p", "low")
            wait_for(lambda: controller.ask(*query) == "idle 2", seconds=90)
            yield controller
        finally:
            controller.ask("scancel", "--user=root", "--signal=KILL")
            for process in daemons:
                process.send_signal(signal.SIGTERM)
