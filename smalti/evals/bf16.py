"""Scores held-out text in bfloat16 if that gives the same result as float32 on a sample.

Rounding errors of many tokens average out: on the models of docs/log.md the bits per byte of a text are equal within
0.00005. The likeliest of ten candidates may change, so ranked tasks use the engine's dtype.
"""

import copy
import math
from collections.abc import Collection, Sequence

import torch
from torch import nn

from smalti.evals.likelihood import Window, score

_SAMPLE_TOKENS = 32_768
_MIN_SAMPLES = 4
"""A text of fewer samples is not tried, because the trial would cost more than it saves."""
_AGREE_BITS = 0.0002
"""Largest difference of the sample in bits per byte: rounding alone gives 0.00005, results are printed to 0.001."""
_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def is_native(model: nn.Module, cpu_features: Collection[str]) -> bool:
    """Return True if the device of ``model`` has bfloat16 instructions; a CPU's are in ``cpu_features``."""
    device = next(model.parameters()).device.type
    if device == "cpu":
        return not _CPU_FEATURES.isdisjoint(cpu_features)
    return device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def copy_that_agrees(
    model: nn.Module, windows: Sequence[Window], *, bytes_per_token: float, batch_tokens: int
) -> nn.Module | None:
    """Return a bfloat16 copy of a float32 model, if it gives the same bits per byte on a sample of ``windows``.

    Returns None otherwise, and if ``model`` has another dtype or the text is too short to save time.
    """
    every = sum(len(window.ids) - 1 for window in windows) // _SAMPLE_TOKENS
    if every < _MIN_SAMPLES or next(model.parameters()).dtype != torch.float32:
        return None
    sample = windows[::every]
    faster = copy.deepcopy(model).to(torch.bfloat16)
    nats = [score(candidate, sample, batch_tokens=batch_tokens).sum() for candidate in (model, faster)]
    n_bytes = bytes_per_token * sum(len(window.ids) - window.first for window in sample)
    return faster if abs(nats[1] - nats[0]) / math.log(2) <= _AGREE_BITS * n_bytes else None
