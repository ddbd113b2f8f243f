"""Read this process's rank and world from the environment, the only place to do so. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bert_dp.config import ConfigError, Issue
from bert_dp.files import INIT_FILE

# (rank, local rank, world size, local world size): torchrun / accelerate, deepspeed, Slurm, Open MPI
_SCHEMES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    # the step's own: only srun sets them, while a batch script itself also sees SLURM_PROCID, SLURM_NTASKS
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)


@dataclasses.dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


def read_world(environ: Mapping[str, str]) -> World:
    """Read rank and world from the first scheme present; a lone process when none is.

    Raises ConfigError for variables that are not numbers and a rank outside the world.
    """
    for rank, local_rank, size, local_size in _SCHEMES:
        if rank not in environ or size not in environ:
            continue
        try:
            world = World(
                int(environ[rank]),
                int(environ.get(local_rank, environ[rank])),
                int(environ[size]),
                _local_size(environ, local_size, environ[size]),
            )
        except ValueError:
            message = f"and {size} and their local kin must be whole numbers"
            raise ConfigError([Issue(rank, "wrong_type", message)]) from None
        if not 0 <= world.rank < world.size:
            message = f"{world.rank} is outside {size}={world.size}"
            raise ConfigError([Issue(rank, "out_of_range", message, world.rank, size)])
        if not 0 <= world.local_rank < world.local_size <= world.size:
            message = f"{world.local_rank} and {local_size}={world.local_size} do not fit {size}={world.size}"
            raise ConfigError([Issue(local_rank, "conflict", message, world.local_rank, size)])
        return world
    return World(0, 0, 1, 1)


def _local_size(environ: Mapping[str, str], name: str, default: str) -> int:
    """Count the ranks on this node. Slurm lists all nodes: 4(x2),1 = 4 on each of two nodes, 1 on the third.

    Raises ValueError.
    """
    if name == "LOCAL_WORLD_SIZE":
        default = environ.get("LOCAL_SIZE", default)  # deepspeed's name for it
    nodes: list[int] = []
    for part in environ.get(name, default).split(","):
        count, _, times = part.rstrip(")").partition("(x")
        nodes += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0")) if len(nodes) > 1 else 0
    return nodes[min(node, len(nodes) - 1)]


def check_rendezvous(world: World, environ: Mapping[str, str]) -> None:
    """Raise ConfigError when several ranks have no place for a rendezvous: our launcher's file or env://."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world.size > 1 and INIT_FILE not in environ and missing:
        message = f"not set, and {world.size} ranks need a place to meet"
        hint = "on one machine MASTER_ADDR=127.0.0.1 and any free MASTER_PORT, else rank 0's host"
        raise ConfigError([Issue(" and ".join(missing), "missing", message, hint=hint)])


def standard_variables(world: World, gpu: int | None) -> dict[str, str]:
    """Return RANK and its kin, for packages that read nothing else and take LOCAL_RANK for the number of the
    GPU: 0 where a rank sees only its own. `gpu`: None on a CPU."""
    named = world if gpu is None else dataclasses.replace(world, local_rank=gpu)
    return dict(zip(_SCHEMES[0], map(str, dataclasses.astuple(named)), strict=True))
