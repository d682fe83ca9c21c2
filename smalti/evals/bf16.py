"""Scores held-out text in bfloat16 where that is faster and gives the same figure as float32 on a sample.

Rounding errors of many tokens average out: on the models of docs/log.md the bits per byte of a text are the same to
0.00005. They do not for the likeliest of ten candidates, so ranked tasks keep the engine's dtype.
"""

import copy
import math
from collections.abc import Collection, Sequence

import torch
from torch import nn

from smalti.evals.likelihood import Window, score

_SAMPLE_TOKENS = 32_768
_WORTH = 4
"""Samples that a text must hold: below that the trial costs more than it saves."""
_AGREE_BITS = 0.0002
"""Bits per byte that the sample may differ by: rounding alone makes 0.00005 of it, what is printed has 0.001."""
_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def is_native(model: nn.Module, cpu_features: Collection[str]) -> bool:
    """Whether the device of ``model`` multiplies bfloat16 itself; a CPU is known by its ``cpu_features``."""
    device = next(model.parameters()).device.type
    if device == "cpu":
        return not _CPU_FEATURES.isdisjoint(cpu_features)
    return device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def copy_that_agrees(
    model: nn.Module, windows: Sequence[Window], *, bytes_per_token: float, batch_tokens: int
) -> nn.Module | None:
    """A bfloat16 copy of a float32 model, if it gives the same bits per byte on a sample of ``windows``.

    None where it does not, where ``model`` has another dtype, and where the text is too short for it to pay.
    """
    every = sum(len(window.ids) - 1 for window in windows) // _SAMPLE_TOKENS
    if every < _WORTH or next(model.parameters()).dtype != torch.float32:
        return None
    sample = windows[::every]
    faster = copy.deepcopy(model).to(torch.bfloat16)
    nats = [score(candidate, sample, batch_tokens=batch_tokens).sum() for candidate in (model, faster)]
    n_bytes = bytes_per_token * sum(len(window.ids) - window.first for window in sample)
    return faster if abs(nats[1] - nats[0]) / math.log(2) <= _AGREE_BITS * n_bytes else None
