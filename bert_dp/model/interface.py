"""Define the model interface that engines, optimizers and the compiler use."""

from collections.abc import Mapping, Sequence

from torch import nn


class Model(nn.Module):
    """Base class of the models of all tasks. The default methods suit a small model that is never split."""

    def blocks(self) -> Sequence[nn.Module]:
        """Return the modules that fsdp shards and activation checkpointing recomputes, each as one unit."""
        return ()

    def compiled_parts(self) -> Sequence[nn.Module]:
        """Return the modules that torch.compile compiles separately."""
        return ()

    def tensor_plan(self) -> Mapping[str, tuple[int, int]] | None:
        """Return the parameters that tensor parallelism splits: name -> (dimension, number of matrices fused
        along it). Other parameters stay whole. None = the model cannot be split."""
        return None

    def is_decayed(self, name: str) -> bool:
        """Return whether weight decay applies to a parameter. It does not apply to biases and norms."""
        return "bias" not in name and "norm" not in name

    def is_matrix(self, name: str) -> bool:
        """Return whether Muon updates a parameter."""
        return False

    def is_pretrained(self, name: str) -> bool:
        """Return whether a tensor is loaded from run.init_from. Others keep their seeded initial values."""
        return True
