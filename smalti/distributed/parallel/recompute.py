"""Activation checkpointing of any block, in place."""

from functools import cache
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Save only the inputs of ``block`` in the forward pass and run it again in the backward pass.

    Replaces the block's class by a subclass of it, as ``fully_shard`` of FSDP2 does.
    """
    # torch's CheckpointWrapper would become part of every parameter's name, and torch.compile (torch 2.13) cannot trace
    # the hooks of torch.distributed._composable.checkpoint, so that the block would run in eager mode.
    block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {})


class _Recomputed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._forward_once, *args, use_reentrant=False, **kwargs)

    def _forward_once(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)
