"""Log-likelihood of given tokens: the scoring pass of every likelihood task.

Guarantees: sums over tokens in float64; a window's score does not depend on those beside it, up to rounding (padding is
to the right, behind a causal mask, and is never scored); inputs that windows beside each other share are computed once;
logits exist for the scored tokens only, a chunk at a time.

B: rows. T: inputs of a row. W: windows. N: scored tokens. C: those of a chunk. D: hidden size. V: vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.evals.prefixes import Row, batches_of, can_branch, forward_of, pack, rows_of
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

    def split(self, sizes: Iterable[int]) -> Iterator["Scores"]:
        """Yield the scores of the first so many windows, of the next so many, and so on."""
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            yield Scores(self.nats[part], self.n_tokens[part], self.greedy[part])
            start += size


def score(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    batch_tokens: int = 4096,
    progress: Progress = lambda done, total: None,
) -> NDArray[np.float64]:
    """Nats (negative natural log-likelihood) of each window's scored targets, summed; one number for each window.

    Windows of like length share a batch of at most ``batch_tokens`` inputs. ``progress`` is called after each batch
    with the inputs of the windows that are done, of all. Raises UserError where a likelihood is not finite.
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
        for rows in batches_of(rows_of(windows, branches=can_branch(model)), batch_tokens):
            numbers, totals_2W = _score_batch(model, windows, rows, device, greedy=greedy)
            nats[numbers], missed[numbers] = totals_2W.cpu().numpy()
            done += sum(len(windows[number].ids) - 1 for number in numbers)
            progress(done, total)
    return scores_of(windows, nats, missed)


def scores_of(windows: Sequence[Window], nats: NDArray[np.float64], missed: NDArray[np.float64]) -> Scores:
    """Return the scores from the sums of each window. Raises UserError where a likelihood is not finite."""
    if not np.isfinite(nats).all():
        raise UserError(
            "the model gives a likelihood that is not a finite number (NaN or infinite)",
            hint="look at the loss of the run and check the exported weights",
        )
    n_tokens = np.array([len(window.ids) - window.first for window in windows], dtype=np.int64)
    return Scores(nats, n_tokens, missed == 0)


def _score_batch(
    model: nn.Module, windows: Sequence[Window], rows: Sequence[Row], device: torch.device, *, greedy: bool
) -> tuple[list[int], Tensor]:
    """Return the windows' numbers, and the nats and the number of missed targets of each, float64 [2, windows]."""
    numbers = [number for row in rows for number in row.numbers]
    batch = pack(windows, rows)
    targets = np.concatenate([windows[number].ids[windows[number].first :] for number in numbers])
    sizes = [len(windows[number].ids) - windows[number].first for number in numbers]
    row_N, column_N, targets_N, window_N = (
        torch.from_numpy(array).to(device)
        for array in (batch.row_N, batch.column_N, targets, np.repeat(np.arange(len(numbers)), sizes))
    )

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        scores_2N = token_scores(hidden_BTD[row_N, column_N], weight_VD, targets_N, logits_of(model), greedy)
        totals_2W = torch.zeros(2, len(numbers), dtype=torch.float64, device=device)
        return totals_2W.index_add_(1, window_N, scores_2N.double())

    return numbers, forward_of(model, rows, batch, device, head)


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
    return token_scores(hidden_ND, weight_VD, targets_N, logits, greedy=False)[0]


def token_scores(
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
