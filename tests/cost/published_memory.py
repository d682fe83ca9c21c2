"""Published formulas of memory, under their names: to compare with others' tables, not to plan with.

``cost/memory/snapshots.py`` computes what this trainer holds; these are what papers print: bytes a parameter of
mixed-precision Adam (ZeRO), and activations of a GPT layer in half precision with dropout (Korthikanti et al.).
"""

from typing import Literal

MIXED_PRECISION_ADAM_BYTES = 16
"""Bytes a parameter: weights and gradients in half precision, and in fp32 weights and both moments (Rajbhandari et al.
2020, arXiv 1910.02054, section 3.1). Here they are 4 + 4 + 8 in fp32: as many, with the weights in bf16 made of them
only while they are used."""


def zero_bytes(params: float, ranks: int, stage: Literal[0, 1, 2, 3]) -> float:
    """Weights, gradients and optimizer on one of ``ranks`` (ZeRO, figure 1): the optimizer's 12 bytes a parameter are
    split from stage 1, gradients' 2 from 2, weights' 2 from 3."""
    split = (1 if stage < 3 else ranks, 1 if stage < 2 else ranks, 1 if stage < 1 else ranks)
    return params * sum(size / over for size, over in zip((2, 2, 12), split, strict=True))


def layer_activation_bytes(
    tokens: float,
    hidden: int,
    heads: int,
    seq_len: int,
    *,
    tensor: int = 1,
    sequence: bool = False,
    scores: bool = True,
) -> float:
    """What one layer of GPT keeps for the backward pass (Korthikanti et al. 2022, arXiv 2205.05198, table 2).

    s b h (10 + 24 / t + 5 a s / (h t)); with ``sequence`` norms, dropouts and the residual stream are split as well:
    s b h (34 + 5 a s / h) / t. Without ``scores`` (a fused attention, or selective recomputation) the last term goes.
    Half precision, dropout masks of one byte, an MLP of four times the width with GeLU.
    """
    quadratic = 5 * heads * seq_len / hidden if scores else 0.0
    whole = (34 + quadratic) / tensor if sequence else 10 + (24 + quadratic) / tensor
    return tokens * hidden * whole
