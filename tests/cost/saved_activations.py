"""Bytes of activations that all blocks together save for the backward pass."""

from smalti.config.model import ModelConfig
from smalti.cost.memory.snapshots import Rank, _Step
from smalti.cost.memory.tape import MicrobatchShape


def saved_activation_bytes(model: ModelConfig, shape: MicrobatchShape, *, recompute: bool) -> float:
    """Saved by all blocks for one microbatch; with recomputation their inputs and the largest block."""
    step = _Step(model, shape, Rank(recompute=recompute))
    kept = sum(step._block(layer).saved for layer in step.layers)
    if recompute:
        whole = _Step(model, shape, Rank())
        kept += max(whole._block(layer).saved for layer in whole.layers)
    return kept
