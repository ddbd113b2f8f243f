"""A model as engines, optimizers and the compiler see it: what they read of it is data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn


class Model(nn.Module):
    """The model that a task builds. The defaults are those of a small model that is never divided."""

    def blocks(self) -> Sequence[nn.Module]:
        """The modules that fsdp shards, and recomputation computes again, one by one."""
        return ()

    def compiled_parts(self) -> Sequence[nn.Module]:
        """The modules that torch.compile compiles, each to a graph of its own."""
        return ()

    def tensor_plan(self) -> Mapping[str, tuple[int, int]] | None:
        """How tensor parallelism divides parameters: name -> (dimension, fused matrices in it); what is not
        named stays whole. None = the model cannot be divided."""
        return None

    def is_decayed(self, name: str) -> bool:
        """Whether weight decay applies to a parameter: all but biases and norms (the recipe's groups)."""
        return "bias" not in name and "norm" not in name

    def is_matrix(self, name: str) -> bool:
        """Whether Muon updates a parameter."""
        return False

    def is_pretrained(self, name: str) -> bool:
        """Whether run.init_from gives a tensor; the others begin as the seed makes them."""
        return True
