"""Define a model as engines, optimizers and the compiler read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


class Model(nn.Module):
    """Hold the model that a task builds. The defaults are those of a small model that is never divided."""

    def blocks(self) -> Sequence[nn.Module]:
        """Return the modules that fsdp shards, and recomputation computes again, one by one."""
        return ()

    def compiled_parts(self) -> Sequence[nn.Module]:
        """Return the modules that torch.compile compiles, each to a graph of its own."""
        return ()

    def tensor_plan(self) -> Mapping[str, tuple[int, int]] | None:
        """Return the division of parameters by tensor parallelism: name -> (dimension, fused matrices in it);
        what is not named stays whole. None = the model cannot be divided."""
        return None

    def is_decayed(self, name: str) -> bool:
        """Return True if weight decay applies to a parameter: all but biases and norms (the recipe's
        groups)."""
        return "bias" not in name and "norm" not in name

    def is_matrix(self, name: str) -> bool:
        """Return True if Muon updates a parameter."""
        return False

    def is_pretrained(self, name: str) -> bool:
        """Return True if run.init_from gives a tensor; the others begin as the seed makes them."""
        return True
