"""Log-likelihood of given tokens: the scoring pass of every likelihood task.

Guarantees: sums over tokens in float64; a row's score does not depend on the rows beside it (padding is to the
right, behind a causal mask, and is never scored); logits exist for the scored tokens only, a chunk at a time.

B: rows. T: inputs of a row. W: windows. N: scored tokens. C: those of a chunk. D: hidden size. V: vocabulary.
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


@dataclass(frozen=True)
class Scores:
    """What one pass gives for each window."""

    nats: NDArray[np.float64]
    """Negative natural log-likelihood of the scored targets, summed."""
    n_tokens: NDArray[np.int64]
    """Number of scored targets."""
    greedy: NDArray[np.bool_]
    """Whether every scored target is the likeliest token, so that greedy generation gives the same text."""


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
    return _score(model, windows, batch_tokens, progress, greedy=False).nats


def score_greedy(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    batch_tokens: int = 4096,
    progress: Progress = lambda done, total: None,
) -> Scores:
    """``score``, with the number of targets, and whether all are the likeliest token."""
    return _score(model, windows, batch_tokens, progress, greedy=True)


def _score(
    model: nn.Module, windows: Sequence[Window], batch_tokens: int, progress: Progress, *, greedy: bool
) -> Scores:
    nats, missed = np.zeros(len(windows)), np.zeros(len(windows))
    device = next(model.parameters()).device
    done, total = 0, sum(len(window.ids) - 1 for window in windows)
    with torch.inference_mode():
        for rows in _batches(windows, batch_tokens):
            batch = [windows[row] for row in rows]
            nats[rows], missed[rows] = _score_batch(model, batch, device, greedy=greedy).cpu().numpy()
            done += sum(len(window.ids) - 1 for window in batch)
            progress(done, total)
    if not np.isfinite(nats).all():
        raise UserError(
            "the model gives a likelihood that is not a finite number (NaN or infinite)",
            hint="look at the loss of the run and check the exported weights",
        )
    n_tokens = np.array([len(window.ids) - window.first for window in windows], dtype=np.int64)
    return Scores(nats, n_tokens, missed == 0)


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers, longest first, so that padding is small and memory is largest at once.

    Windows with the same inputs (options of one token) are beside each other, and count once.
    """
    order = sorted(range(len(windows)), key=lambda row: (-len(windows[row].ids), windows[row].ids[:-1].tobytes()))
    rows: list[int] = []
    width = n_inputs = 0
    for row in order:
        is_new = not rows or not np.array_equal(windows[row].ids[:-1], windows[rows[-1]].ids[:-1])
        if rows and is_new and (n_inputs + 1) * width > batch_tokens:
            yield rows
            rows, n_inputs = [], 0
        if not rows:
            width = len(windows[row].ids) - 1
        rows.append(row)
        n_inputs += is_new
    if rows:
        yield rows


def _score_batch(model: nn.Module, windows: list[Window], device: torch.device, *, greedy: bool) -> Tensor:
    """Return the nats and the number of missed targets of each window, float64 [2, windows]."""
    width = max(len(window.ids) for window in windows) - 1
    inputs: list[NDArray[np.int64]] = []
    input_row: list[NDArray[np.int64]] = []
    for row, window in enumerate(windows):
        if row == 0 or not np.array_equal(window.ids[:-1], windows[row - 1].ids[:-1]):
            inputs.append(np.pad(window.ids[:-1], (0, width + 1 - len(window.ids))))
        input_row.append(np.full(len(window.ids) - window.first, len(inputs) - 1))
    columns = np.concatenate([np.arange(window.first - 1, len(window.ids) - 1) for window in windows])
    targets = np.concatenate([window.ids[window.first :] for window in windows])
    window_row = np.repeat(np.arange(len(windows)), [len(window.ids) - window.first for window in windows])
    row_N, column_N, targets_N, window_N = (
        torch.from_numpy(array).to(device) for array in (np.concatenate(input_row), columns, targets, window_row)
    )

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        scores_2N = _token_scores(hidden_BTD[row_N, column_N], weight_VD, targets_N, logits_of(model), greedy)
        totals_2W = torch.zeros(2, len(windows), dtype=torch.float64, device=device)
        return totals_2W.index_add_(1, window_N, scores_2N.double())

    value: Tensor = model(torch.from_numpy(np.stack(inputs)).to(device), head=head).value
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
    return _token_scores(hidden_ND, weight_VD, targets_N, logits, greedy=False)[0]


def _token_scores(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, logits: Callable[[Tensor, Tensor], Tensor], greedy: bool
) -> Tensor:
    """Return nats and, with ``greedy``, 1 for each target that is not the likeliest token, fp32 [2, N]."""
    rows = max(1, _CHUNK_LOGITS // weight_VD.shape[0])
    parts = [hidden_ND.new_zeros(2, 0, dtype=torch.float32)]
    for hidden_CD, targets_C in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True):
        logits_CV = logits(hidden_CD, weight_VD).float()
        nats_C = logits_CV.logsumexp(dim=-1) - logits_CV.gather(1, targets_C[:, None])[:, 0]
        missed_C = (logits_CV.argmax(dim=-1) != targets_C).float() if greedy else torch.zeros_like(nats_C)
        parts.append(torch.stack([nats_C, missed_C]))
    return torch.cat(parts, dim=1)
