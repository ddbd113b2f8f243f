"""Declare properties of engines and optimizers for checks, cost estimates, plans and advice. Torch-free.

Each engine has a row in ENGINES and a file `bert_dp/parallel/NAME.py`; each optimizer has a row in OPTIMIZERS
and a file `bert_dp/optim/NAME.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Shard = Literal["optimizer", "gradients", "parameters"]
SHARDS: tuple[Shard, ...] = ("optimizer", "gradients", "parameters")  # in the order of the ZeRO stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Properties of an engine; the defaults describe plain data parallelism."""

    shards: tuple[Shard, ...] = ()
    """Kinds of state sharded over the replicas; if `stages` is true, only the first `zero_stage` of these."""
    stages: bool = False
    """True if `parallel.zero_stage` has an effect."""
    settings: tuple[str, ...] = ()
    """Fields of `parallel` that the engine reads, other than engine, tensor and activation_checkpointing."""
    min_ranks: int = 1
    max_ranks: int | None = None
    tensor: bool = False
    """True if the engine can be combined with tensor parallelism."""
    whole_tensors: bool = True
    """True if the optimizer receives whole tensors, as Muon requires."""
    flattens: bool = False
    """True if sharded optimizer state is one flat vector, which hides the tensor norms that LAMB needs."""
    refused_precisions: tuple[str, ...] = ()
    noise_scale: bool = False
    """True if the engine exposes gradients at two batch sizes, as `log.noise_scale` requires."""
    waits_in_forward: bool = False
    """True if ranks wait for each other in forward passes, so that a rank's compute time is unknown."""
    master_copy: bool = False
    """True if each rank keeps a second copy of its shard of the weights (ZeRO stages 1 and 2)."""
    whole_gradients: bool = False
    """True if gradients stay whole during accumulation and are sharded in the last micro batch of a step."""
    package: str | None = None
    """Package that the engine wraps. The extra in pyproject.toml that installs it has the same name."""
    benchmarked: bool = True
    """True if `scale --engines` accepts the engine."""
    waits: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    """Functions that only wait for a collective: (end of the source file's path, function name) -> the
    collective. The hang detector looks for these functions in the stacks of the ranks."""


ENGINES: dict[str, EngineFacts] = {
    "single": EngineFacts(max_ranks=1, noise_scale=True, benchmarked=False),
    "ddp": EngineFacts(
        settings=("bucket_mib", "reduce_dtype", "static_graph"), tensor=True, noise_scale=True
    ),
    "zero1": EngineFacts(
        shards=("optimizer",),
        settings=("bucket_mib",),
        tensor=True,
        noise_scale=True,
        waits={("parallel/zero1.py", "_wait"): "a reduction"},
    ),
    "fsdp": EngineFacts(
        shards=SHARDS,
        settings=("fsdp_replicas",),
        tensor=True,
        whole_tensors=False,
        waits_in_forward=True,
        whole_gradients=True,
    ),
    "accelerate": EngineFacts(settings=("bucket_mib",), package="accelerate"),
    "deepspeed": EngineFacts(
        shards=SHARDS,
        stages=True,
        settings=("zero_stage",),
        whole_tensors=False,
        flattens=True,
        refused_precisions=("fp64", "fp16"),
        waits_in_forward=True,
        master_copy=True,
        package="deepspeed",
    ),
    "independent": EngineFacts(min_ranks=2, benchmarked=False),
}


def engine_facts(engine: str) -> EngineFacts:
    """Look up an engine by its name in `parallel.engine` (auto = ddp) or `scale --engines`."""
    return ENGINES["ddp" if engine == "auto" else engine.partition("-")[0]]


def sharded(engine: str, zero_stage: int) -> tuple[Shard, ...]:
    """Return the kinds of state that `engine` shards over the replicas."""
    facts = engine_facts(engine)
    return facts.shards[:zero_stage] if facts.stages else facts.shards


def benchmark_names() -> tuple[str, ...]:
    """List the names for `scale --engines`: one per engine or ZeRO stage, such as ddp and deepspeed-2."""
    names: list[str] = []
    for engine, facts in ENGINES.items():
        if facts.benchmarked:
            names += [f"{engine}-{k}" for k in range(len(SHARDS) + 1)] if facts.stages else [engine]
    return tuple(names)


def computes_alone(engine: str, tensor: int) -> bool:
    """Return True if a rank never waits for other ranks before the first reduction of a step."""
    return tensor == 1 and not engine_facts(engine).waits_in_forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Properties of an optimizer; the defaults describe AdamW."""

    settings: tuple[str, ...] = ()
    """Fields of `optim` that only this optimizer reads."""
    needs: Literal["whole_tensors", "tensor_norms", "replicas"] | None = None
    """Data a shard's update needs besides the shard: whole tensors, tensor norms, or a whole replica."""
    matrix_moments: int = 2
    """Optimizer-state values per parameter in the blocks' weight matrices; any other parameter has 2."""


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "lamb": OptimizerFacts(needs="tensor_norms"),
    "muon": OptimizerFacts(settings=("momentum",), needs="whole_tensors", matrix_moments=1),
}
CUSTOM_OPTIMIZER = OptimizerFacts(needs="replicas")


def optimizer_facts(name: str) -> OptimizerFacts:
    """Look up an optimizer by `optim.name`. A custom optimizer is assumed to need as much memory as AdamW."""
    return OPTIMIZERS.get(name, CUSTOM_OPTIMIZER)
