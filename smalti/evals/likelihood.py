"""Log-likelihood of given tokens: the scoring pass of every likelihood task.

Guarantees: sums over tokens in float64; a row's score does not depend on the rows beside it (padding is to the
right, behind a causal mask, and is never scored); logits exist for the scored tokens only, a chunk at a time.

B: rows. T: inputs of a row. N: scored tokens. C: those of a chunk. D: hidden size. V: vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.model.decoder import Decoder

_CHUNK_LOGITS = 1 << 20
"""Logits that exist at one time: 4 MiB in fp32, which stays in a CPU's cache; of 2^19 to 2^22 the fastest there."""

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in tokens."""


@dataclass(frozen=True)
class Window:
    """T + 1 tokens: ``ids[:-1]`` are read, and the targets ``ids[first:]`` (first at least 1) are scored."""

    ids: NDArray[np.int64]
    first: int

    def __post_init__(self) -> None:
        assert 1 <= self.first < len(self.ids), f"nothing to score: first={self.first} of {len(self.ids)} tokens"


def score(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    batch_tokens: int = 4096,
    progress: Progress = lambda done, total: None,
) -> NDArray[np.float64]:
    """Nats (negative natural log-likelihood) of each window's scored targets, summed; one number for each window.

    Windows of like length share a batch of at most ``batch_tokens`` inputs. ``progress`` is called after each batch
    with the inputs that the model has read, of all. Raises UserError where a likelihood is not finite.
    """
    nats = np.zeros(len(windows))
    device = next(model.parameters()).device
    done, total = 0, sum(len(window.ids) - 1 for window in windows)
    with torch.inference_mode():
        for rows in _batches(windows, batch_tokens):
            nats[rows] = _score_batch(model, [windows[row] for row in rows], device).cpu().numpy()
            done += sum(len(windows[row].ids) - 1 for row in rows)
            progress(done, total)
    if not np.isfinite(nats).all():
        raise UserError(
            "the model gives a likelihood that is not a finite number (NaN or infinite)",
            hint="look at the loss of the run and check the exported weights",
        )
    return nats


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers, longest first, so that padding is small and memory is largest at once."""
    order = sorted(range(len(windows)), key=lambda row: -len(windows[row].ids))
    start = 0
    while start < len(order):
        width = len(windows[order[start]].ids) - 1
        rows = order[start : start + max(1, batch_tokens // width)]
        yield rows
        start += len(rows)


def _score_batch(model: nn.Module, windows: list[Window], device: torch.device) -> Tensor:
    width = max(len(window.ids) for window in windows) - 1
    inputs = np.zeros((len(windows), width), dtype=np.int64)
    targets = np.zeros((len(windows), width), dtype=np.int64)
    counts = np.zeros((len(windows), width), dtype=bool)
    for row, window in enumerate(windows):
        length = len(window.ids) - 1
        inputs[row, :length] = window.ids[:-1]
        targets[row, :length] = window.ids[1:]
        counts[row, window.first - 1 : length] = True
    counts_BT = torch.from_numpy(counts).to(device)
    targets_N = torch.from_numpy(targets).to(device)[counts_BT]
    row_N = counts_BT.nonzero()[:, 0]

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        nats_N = token_nats(hidden_BTD[counts_BT], weight_VD, targets_N, logits=logits_of(model))
        return torch.zeros(len(windows), dtype=torch.float64, device=device).index_add_(0, row_N, nats_N.double())

    value: Tensor = model(torch.from_numpy(inputs).to(device), head=head).value
    return value


def logits_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The function from hidden states and output matrix to logits: a decoder's, with its soft cap, or the product."""
    return model.logits if isinstance(model, Decoder) else F.linear


def token_nats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    logits: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Cross-entropy of each target in nats, fp32 [N]; ``logits``, ``Decoder.logits``, makes them chunk by chunk."""
    rows = max(1, _CHUNK_LOGITS // weight_VD.shape[0])
    parts = [hidden_ND.new_zeros(0, dtype=torch.float32)]
    for hidden_CD, targets_C in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True):
        logits_CV = logits(hidden_CD, weight_VD).float()
        parts.append(logits_CV.logsumexp(dim=-1) - logits_CV.gather(1, targets_C[:, None])[:, 0])
    return torch.cat(parts)
