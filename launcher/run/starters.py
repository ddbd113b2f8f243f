"""Build the command and environment with which torchrun, accelerate or deepspeed starts this node's workers.
accelerate's default configuration, deepspeed's hostfile, and the environment variables of an outer launcher
are all ignored."""

import dataclasses
import importlib.util
import json
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from bert_dp.config.errors import install_command
from bert_dp.files import HEARTBEATS, INIT_FILE, LOG_DIR
from bert_dp.files.reaper import child_environment, module_command
from launcher.children import kernel_caches
from launcher.run.nodes import Place

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
WORKER = "bert_dp.worker"
RENDEZVOUS = "bert-dp-file"  # see rendezvous.py; torchrun's own backends listen on all interfaces
# an outer launcher's environment variables with these prefixes are removed, because torchrun reads PET_* as
# defaults for its options, and some launchers do not overwrite the other variables
FOREIGN = ("PET_", "TORCHELASTIC_", "ACCELERATE_", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@dataclasses.dataclass(frozen=True)
class NodeStart:
    """Additional parameters for starting the ranks of one node of a multi-node run."""

    place: Place
    attempt: int
    config: str  # text of config.yaml, sent because the node may not see the new file yet
    store_port: int  # port of the ranks' store, served by node 0's torchrun
    first_rank: int  # global rank of this node's first rank
    store: socket.socket | None = None  # bound socket of the store on node 0; None on other nodes


@dataclasses.dataclass(frozen=True)
class RankStart:
    """Parameters for starting the ranks of this node."""

    nproc: int  # ranks on this node
    worker: Sequence[str]  # arguments of each worker after the path of its configuration file
    launcher: str = "torchrun"
    on_gpu: bool = False
    grace_s: float = 300.0  # time limit for ranks to save and exit after a stop signal
    cores: Collection[int] | None = None  # cores shared by the workers; None = all usable cores
    node: NodeStart | None = None  # None = this node is the only one

    @property
    def ranks(self) -> range | None:
        """Return the global ranks of this node; None = all ranks of the run."""
        node = self.node
        return None if node is None else range(node.first_rank, node.first_rank + self.nproc)


def launcher_problem(launcher: str) -> str | None:
    """Return the reason why this launcher cannot be used, or None."""
    if launcher not in LAUNCHERS:
        return f"unknown launcher {launcher}; choose from {', '.join(LAUNCHERS)}"
    if launcher != "torchrun" and importlib.util.find_spec(launcher) is None:
        return f"{launcher} needs `{install_command(launcher)}`"
    return None


def start_command(start: RankStart, scratch: Path, worker: list[str]) -> list[str]:
    """Build the command that starts this node's ranks. `worker`: arguments of `python -m bert_dp.worker`."""
    nproc, node = start.nproc, start.node
    if start.launcher == "accelerate":
        return _accelerate(nproc, scratch, worker)
    if start.launcher == "deepspeed":
        return _deepspeed(nproc, scratch, worker)
    # rendezvous.py uses a file on one node, and a bound socket on several nodes
    place = [f"--rdzv-endpoint={scratch / 'agent'}", "--rdzv-id=bert-dp"]
    if node is not None:
        conf = f"node={node.place.rank},nodes={node.place.nodes}"
        if node.store is not None:
            conf += f",socket={node.store.fileno()}"
        endpoint = f"--rdzv-endpoint={node.place.address}:{node.store_port}"
        place = [endpoint, f"--rdzv-conf={conf}", f"--rdzv-id=bert-dp-{node.attempt}"]
    return [
        *module_command("torch.distributed.run"),
        f"--nnodes={node.place.nodes if node else 1}",
        f"--nproc-per-node={nproc}",
        f"--log-dir={scratch / 'torchrun'}",
        f"--rdzv-backend={RENDEZVOUS}",
        *place,
        "-m",
        WORKER,
        *worker,
    ]


def _accelerate(nproc: int, scratch: Path, worker: list[str]) -> list[str]:
    """Build accelerate's command and write its configuration file. accelerate runs torchrun internally.

    MULTI_GPU starts N ranks on CPUs too, whereas the option --cpu starts only one. For N = 1, accelerate
    accepts MULTI_GPU only in a configuration file. If main_process_port were in use, accelerate would select
    a rendezvous that listens on all interfaces. Therefore, it is set to 1, where no process listens.
    """
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": nproc,
        "gpu_ids": "all",
        "main_process_ip": "127.0.0.1",
        "main_process_port": 1,
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
    }
    path = scratch / "accelerate.json"
    path.write_text(json.dumps(settings))
    return [
        *module_command("accelerate.commands.launch"),
        f"--config_file={path}",
        f"--rdzv_backend={RENDEZVOUS}",
        f"--log_dir={scratch / 'torchrun'}",
        "--module",
        WORKER,
        *worker,
    ]


def _deepspeed(nproc: int, scratch: Path, worker: list[str]) -> list[str]:
    """Build the command for deepspeed's runner. The runner starts a node launcher, which starts the workers.
    deepspeed always sets CUDA_VISIBLE_DEVICES to 0..N-1, so `env` restores the user's value."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    restore = ["-u", "CUDA_VISIBLE_DEVICES"] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    return [
        *module_command("deepspeed.launcher.runner"),
        f"--num_gpus={nproc}",
        f"--hostfile={scratch / 'none'}",
        "--master_addr=127.0.0.1",
        "--no_local_rank",
        "--no_python",
        "--log_level=warning",
        "env",
        *restore,
        *module_command(WORKER, "-u"),
        *worker,
    ]


def start_environment(start: RankStart, run_dir: Path, scratch: Path) -> dict[str, str]:
    """Build the workers' environment, which makes them exit when this process exits.

    On one node, workers rendezvous through a file and use only the loopback interface. On several nodes, they
    use the node's interface and write heartbeats to the node's local disk.

    Every rank records its last collectives in memory (torch's flight recorder). The user's settings for the
    recorder take precedence. Desync debugging stays off, because it writes to the store at every collective.
    """
    cores, logs, node = len(os.sched_getaffinity(0)), run_dir / "logs", start.node
    environ = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # number of collectives that each rank keeps
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_TIMING": "1",  # otherwise, records do not show which collectives a GPU has started
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-trace-rank-"),
        "OMP_NUM_THREADS": str(max(1, cores // start.nproc)),
        **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
        "GLOO_SOCKET_IFNAME": node.place.interface if node else "lo",
        "NCCL_SOCKET_IFNAME": f"={node.place.interface}" if node else "lo",  # "=" means an exact match
        "TORCHELASTIC_LOG_LEVEL": "WARNING",
        # a batch system also signals torchrun, which must not kill a rank that is still saving
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(start.grace_s)),
        **child_environment(),
        **kernel_caches(),
        LOG_DIR: str(logs),
    }
    if node is None:
        environ[INIT_FILE] = str(scratch / "workers")
    else:
        environ[HEARTBEATS] = str(scratch / "heartbeats")
    if start.launcher == "accelerate":  # torchrun reads these; accelerate has no option for them
        environ |= {"PET_RDZV_ENDPOINT": str(scratch / "agent"), "PET_RDZV_ID": "bert-dp"}
    if start.launcher == "deepspeed" and not start.on_gpu:
        environ["DS_ACCELERATOR"] = "cpu"
    return environ
