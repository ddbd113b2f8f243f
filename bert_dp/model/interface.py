"""Define the interface between a model and engines, optimizers and the compiler."""

from collections.abc import Mapping, Sequence

from torch import nn


class Model(nn.Module):
    """Base of a task's model. The defaults suit a small model that is never split."""

    def blocks(self) -> Sequence[nn.Module]:
        """Return the modules that fsdp shards, and activation checkpointing recomputes, one by one."""
        return ()

    def compiled_parts(self) -> Sequence[nn.Module]:
        """Return the modules that torch.compile compiles, each to a separate graph."""
        return ()

    def tensor_plan(self) -> Mapping[str, tuple[int, int]] | None:
        """Return how tensor parallelism splits parameters: name -> (dimension, number of matrices fused along
        it); the others stay whole. None = the model cannot be split."""
        return None

    def is_decayed(self, name: str) -> bool:
        """Return whether a parameter has weight decay: all but biases and norms (as in the recipe)."""
        return "bias" not in name and "norm" not in name

    def is_matrix(self, name: str) -> bool:
        """Return whether Muon updates a parameter."""
        return False

    def is_pretrained(self, name: str) -> bool:
        """Return whether run.init_from provides a tensor; the others start from their seeded values."""
        return True
