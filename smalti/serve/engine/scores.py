"""What a model thought of tokens: log-probabilities in fp32 over its whole vocabulary.

N: places. C: those of a chunk. D: hidden size. V: vocabulary.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor
from torch.nn import functional as F

from smalti.serve.engine.sequence import TokenScore

_CHUNK_LOGITS = 1 << 20
"""Logits that exist at one time."""


def score(logits_NV: Tensor, ids: Rows[int], n_top: int, vocab_size: int) -> list[TokenScore]:
    """Score ``ids``, one for each row of fp32 logits, with the ``n_top`` likeliest beside it.

    Those come from the first ``vocab_size`` ids: an output head may be padded with ids that have no text.
    """
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    index_N1 = torch.tensor(list(ids), device=logits_NV.device)[:, None]
    own = (logits_NV.gather(1, index_N1) - total_N1)[:, 0].tolist()
    top_Nk, id_Nk = logits_NV[:, :vocab_size].topk(min(n_top, vocab_size), dim=-1)
    tops = zip((top_Nk - total_N1).tolist(), id_Nk.tolist(), strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, (top, top_ids) in zip(ids, own, tops, strict=True)
    ]


def score_hidden(hidden_ND: Tensor, weight_VD: Tensor, ids: Rows[int], n_top: int, vocab_size: int) -> list[TokenScore]:
    """The same from the hidden states, chunk by chunk."""
    rows = max(1, _CHUNK_LOGITS // weight_VD.shape[0])
    scores: list[TokenScore] = []
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        logits_CV = F.linear(hidden_ND[start : start + len(part)], weight_VD).float()
        scores += score(logits_CV, part, n_top, vocab_size)
    return scores
