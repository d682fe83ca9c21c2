"""Activation checkpointing of any block, without a wrapper module, whose name would be part of every parameter's."""

from functools import cache
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Keep only the inputs of ``block`` in the forward pass and run it again in the backward pass.

    In place, by a subclass of the block's own class, as ``fully_shard`` of FSDP2 does.
    """
    block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {})


class _Recomputed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._forward_once, *args, use_reentrant=False, **kwargs)

    def _forward_once(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)
