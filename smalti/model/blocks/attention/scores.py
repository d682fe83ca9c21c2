"""Scores of queries and keys, and the bias that is added to them: the mask, and ALiBi's penalty on distance.

Every kernel computes the same: a score is cap tanh(scale q k / cap) - slope * distance, and a token attends to itself
and to the ``window`` - 1 tokens before it in its document.

Shapes: B batch, T time (queries), S time (keys), H query heads, K key/value heads, G = H / K.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smalti.config.model import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel as its layer calls it: (query [B, H, T, d], key and value [B, K, S, d]) -> [B, T, H, d].

It is built once a batch; layers with the same window share it.
"""


class Scores(NamedTuple):
    """Parameters of the score of a query and a key."""

    scale: float
    """Factor on q k."""
    cap: float | None
    """Bound of scale q k, or None."""
    slopes_KG: Tensor | None
    """ALiBi's slopes, float32, or None."""

    @property
    def plain(self) -> bool:
        """True if a score is only scale q k."""
        return self.cap is None and self.slopes_KG is None


class HeadPart(NamedTuple):
    """The heads of a layer that this rank computes: part ``number`` of ``parts`` equal ones."""

    number: int = 0
    parts: int = 1

    def query_heads(self, config: ModelConfig) -> int:
        """Return the number of query heads in the part."""
        return config.num_attention_heads // self.parts

    def kv_heads(self, config: ModelConfig) -> int:
        """Return the number of key/value heads in the part; if there are fewer than parts, ranks share them."""
        return max(1, config.kv_heads // self.parts)


ALL_HEADS = HeadPart()


def scores_of(config: ModelConfig, device: torch.device, part: HeadPart = ALL_HEADS) -> Scores:
    """Return the parameters of a model's scores, for some of its heads."""
    slopes_KG = None
    if config.position == "alibi":
        slopes_H = alibi_slopes(config.num_attention_heads, device)
        slopes_KG = slopes_H.chunk(part.parts)[part.number].view(part.kv_heads(config), -1)
    scale = config.attention_multiplier or config.width_per_head**-0.5
    return Scores(scale, config.attn_logit_softcapping, slopes_KG)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """Return [H] float32: 2^(-8 i / n) for i = 1 ... n, n the next power of two (Press et al. 2021, arXiv:2108.12409).

    If n is larger than the number of heads, they take every second slope from the second on, then the others, as in
    MPT.
    """
    n = 1 << math.ceil(math.log2(heads))
    slopes = 2.0 ** (torch.arange(1, n + 1, dtype=torch.float32, device=device) * (-8.0 / n))
    return slopes if n == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


def bias_of_distance(
    distance: Tensor, window: int | None, scores: Scores, unseen: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """Return the bias of the scores: -inf for a key after its query, before its window, or ``unseen``.

    Distances are counted in the row or the cache, so position ids are not needed. ``distance`` (and ``unseen``) is
    [..., T, S]. The result has the same shape and ``dtype``, or with slopes [..., K, G, T, S] and float32; with a soft
    cap it is float32 too, as the scores are.
    """
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    if unseen is not None:
        hidden = hidden | unseen
    if scores.slopes_KG is None:
        bias = torch.zeros(hidden.shape, dtype=dtype if scores.plain else torch.float32, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)
    bias = scores.slopes_KG[:, :, None, None] * -distance[..., None, None, :, :].to(torch.float32)
    return bias.masked_fill_(hidden[..., None, None, :, :], -torch.inf)


def document_runs(documents_BT: Tensor) -> Tensor:
    """Return [B, T] bool: True where a document (a run of equal numbers) begins, and at the first token of a row."""
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    torch.ne(documents_BT[:, 1:], documents_BT[:, :-1], out=begins_BT[:, 1:])
    return begins_BT


def bias_of_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor | None) -> Tensor:
    """Return the bias over whole rows, [B or 1, T, T] or with slopes [B or 1, K, G, T, T]."""
    at_T = torch.arange(like_BTD.shape[1], device=like_BTD.device)
    distance_BTS, unseen_BTS = (at_T[:, None] - at_T)[None], None
    if documents_BT is not None:
        runs_BT = document_runs(documents_BT).cumsum(dim=1)
        unseen_BTS = runs_BT[:, :, None] != runs_BT[:, None, :]
        distance_BTS = distance_BTS.expand_as(unseen_BTS)
    return bias_of_distance(distance_BTS, window, scores, unseen_BTS, dtype=like_BTD.dtype)
