"""The only reader of RANK and its kin: which rank this process is. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bert_dp.config import ConfigError

# (rank, local rank, world size, local world size): torchrun / accelerate / deepspeed, Slurm, Open MPI
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


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


def read_world(environ: Mapping[str, str]) -> World:
    """This rank's place, from the first scheme present; a lone process when none is.

    Raises ConfigError naming variables that are not numbers or a rank outside the world.
    """
    for rank, local_rank, size, local_size in _SCHEMES:
        if rank not in environ or size not in environ:
            continue
        try:
            world = World(
                int(environ[rank]),
                int(environ.get(local_rank, environ[rank])),
                int(environ[size]),
                int(
                    environ.get(local_size, environ[size]).partition("(")[0]
                ),  # Slurm: 4(x2) = 4 on each of 2 nodes
            )
        except ValueError:
            raise ConfigError([f"{rank}, {size} and their local kin must be whole numbers"]) from None
        if not 0 <= world.rank < world.size:
            raise ConfigError([f"{rank}={world.rank} is outside {size}={world.size}"])
        if not 0 <= world.local_rank < world.local_size <= world.size:
            raise ConfigError(
                [
                    f"{local_rank}={world.local_rank} and {local_size}={world.local_size} do not fit "
                    f"{size}={world.size}"
                ]
            )
        return world
    return World(0, 0, 1, 1)
