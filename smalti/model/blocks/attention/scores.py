"""How the score of a query and a key is made, and what is added to it: the mask, and ALiBi's penalty on distance.

Guarantees: whatever kernel computes it, a score is cap tanh(scale q k / cap), then minus slope times distance; a token
sees itself and the ``window`` - 1 tokens before it, as far as they are of its document. Distances are counted in the
row (in the cache), so they hold at any length and need no position ids. A document is a run of equal numbers.

Shapes: B batch, T time (queries), S time (keys), H query heads, K key/value heads, G = H / K.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smalti.config.model import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a kernel is to a layer: (query [B, H, T, d], key and value [B, K, S, d]) -> [B, T, H, d].

It holds what is built once a batch; layers of the same window share it.
"""


class Scores(NamedTuple):
    """How a score is made of a query and a key."""

    scale: float
    """Factor on q k."""
    cap: float | None
    """Bound of scale q k; absent: none."""
    slopes_KG: Tensor | None
    """ALiBi's slopes, float32; absent: no penalty."""

    @property
    def plain(self) -> bool:
        """Whether a score is nothing but scale q k."""
        return self.cap is None and self.slopes_KG is None


class HeadPart(NamedTuple):
    """Which heads of a layer are attended here, where ranks share them: part ``number`` of ``parts`` equal ones."""

    number: int = 0
    parts: int = 1

    def query_heads(self, config: ModelConfig) -> int:
        """Of this part."""
        return config.num_attention_heads // self.parts

    def kv_heads(self, config: ModelConfig) -> int:
        """Of this part; where there are fewer than parts, each is in several."""
        return max(1, config.kv_heads // self.parts)


ALL_HEADS = HeadPart()


def scores_of(config: ModelConfig, device: torch.device, part: HeadPart = ALL_HEADS) -> Scores:
    """What a model's config says, for some of its heads."""
    slopes_KG = None
    if config.position == "alibi":
        slopes_H = alibi_slopes(config.num_attention_heads, device)
        slopes_KG = slopes_H.chunk(part.parts)[part.number].view(part.kv_heads(config), -1)
    scale = config.attention_multiplier or config.width_per_head**-0.5
    return Scores(scale, config.attn_logit_softcapping, slopes_KG)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """[H] float32: 2^(-8 i / n) for i = 1 ... n, n the next power of two (Press et al. 2021, arXiv:2108.12409).

    Of more slopes than heads, every second one comes first, from the second on, then the others, as in MPT.
    """
    n = 1 << math.ceil(math.log2(heads))
    slopes = 2.0 ** (torch.arange(1, n + 1, dtype=torch.float32, device=device) * (-8.0 / n))
    return slopes if n == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


def bias_of_distance(
    distance: Tensor, window: int | None, scores: Scores, unseen: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """What is added to the scores: -inf for a key that comes after its query, lies before its window, or is ``unseen``.

    ``distance`` (and ``unseen``) [..., T, S] gives the same shape in ``dtype``, or with slopes [..., K, G, T, S] in
    float32; with a soft cap it is float32 too, as the scores are.
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
    """[B, T] bool: True where a document begins; a row's first token does."""
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    torch.ne(documents_BT[:, 1:], documents_BT[:, :-1], out=begins_BT[:, 1:])
    return begins_BT


def bias_of_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor | None) -> Tensor:
    """The same over whole rows, [B or 1, T, T] or with slopes [B or 1, K, G, T, T]."""
    at_T = torch.arange(like_BTD.shape[1], device=like_BTD.device)
    distance_BTS, unseen_BTS = (at_T[:, None] - at_T)[None], None
    if documents_BT is not None:
        runs_BT = document_runs(documents_BT).cumsum(dim=1)
        unseen_BTS = runs_BT[:, :, None] != runs_BT[:, None, :]
        distance_BTS = distance_BTS.expand_as(unseen_BTS)
    return bias_of_distance(distance_BTS, window, scores, unseen_BTS, dtype=like_BTD.dtype)
