"""What the tests of memory ask of all blocks together."""

from smalti.config.model import ModelConfig
from smalti.cost.memory.moments import Rank, _Step
from smalti.cost.memory.tape import Pass


def kept_bytes(model: ModelConfig, shape: Pass, *, recompute: bool) -> float:
    """What all blocks keep of one microbatch; where they run again, their inputs and the fullest block."""
    step = _Step(model, shape, Rank(recompute=recompute))
    kept = sum(step._block(layer).kept for layer in step.layers)
    if recompute:
        whole = _Step(model, shape, Rank())
        kept += max(whole._block(layer).kept for layer in whole.layers)
    return kept
