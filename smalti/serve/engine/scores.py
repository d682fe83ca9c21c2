"""Log-probabilities of tokens, in fp32 over the whole vocabulary.

N: tokens to score. C: those of a chunk. D: hidden size. V: vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from smalti.serve.engine.request import TokenScore
from smalti.serve.engine.sampling import check_finite

_CHUNK_LOGITS = 1 << 20
"""Maximum number of logits in memory at a time."""


@dataclass(frozen=True)
class SampledIds:
    """The ids that may be sampled and reported: an output head may be padded, and a vocabulary may have holes."""

    size: int
    unused: frozenset[int] = frozenset()
    """Ids below ``size`` that are no token."""

    def of(self, logits_NV: Tensor) -> Tensor:
        """Return the logits of the first ``size`` ids, -inf for unused ones."""
        logits_NV = logits_NV[:, : self.size]
        if not self.unused:
            return logits_NV
        index = torch.tensor(sorted(self.unused), device=logits_NV.device)
        return logits_NV.index_fill(1, index, -torch.inf)


def score(logits_NV: Tensor, ids: Sequence[int], n_top: int, sampled_ids: SampledIds) -> list[TokenScore]:
    """Score ``ids``, one for each row of fp32 logits, each with the ``n_top`` likeliest tokens. Raises NotFinite."""
    check_finite(logits_NV)
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    index_N1 = torch.tensor(list(ids), device=logits_NV.device)[:, None]
    logprobs = (logits_NV.gather(1, index_N1) - total_N1)[:, 0].tolist()
    top_Nk, id_Nk = sampled_ids.of(logits_NV).topk(min(n_top, sampled_ids.size - len(sampled_ids.unused)), dim=-1)
    tops = zip((top_Nk - total_N1).tolist(), id_Nk.tolist(), strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, (top, top_ids) in zip(ids, logprobs, tops, strict=True)
    ]


def score_hidden(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    ids: Sequence[int],
    n_top: int,
    sampled_ids: SampledIds,
    *,
    logits: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> list[TokenScore]:
    """Score ``ids`` from hidden states, chunk by chunk, as ``score`` does; ``logits`` is ``Decoder.logits``."""
    rows = max(1, _CHUNK_LOGITS // weight_VD.shape[0])
    scores: list[TokenScore] = []
    for start in range(0, len(ids), rows):
        chunk = ids[start : start + rows]
        logits_CV = logits(hidden_ND[start : start + len(chunk)], weight_VD).float()
        scores += score(logits_CV, chunk, n_top, sampled_ids)
    return scores
