"""Attention on the CPU as plain matmuls over spans: some queries, and the keys that they may see.

Why it exists: torch's fused CPU kernel computes the scores again in its backward pass, and knows no window, no soft cap
and no bias but a whole [T, T] mask.

Guarantees: what is not seen is not computed, up to the edges of blocks of 128 queries; the mask is one strip of
[128, T + 128] for all blocks and layers, as causality, window and ALiBi depend on distances alone; short documents of a
packed row share a block, with a mask of [128, 128]. The scores are rounded to the input's dtype before the softmax, as
in transformers' eager attention; with ALiBi or a soft cap what follows is in float32. Sums go in a fixed order: the
same bits on every call. With ``keep`` the probabilities stay for backward, otherwise they are computed again.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads, G = H / K query heads per key head, d width of a
head, b rows of a span, t its queries, s keys that they may see, g = G t.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.model.blocks.attention.scores import Scores, bias_of_distance

BLOCK_TOKENS = 128


class Span(NamedTuple):
    """Queries ``begin`` to ``end`` of some rows against the keys ``first`` to ``end``."""

    rows: slice
    begin: int
    end: int
    first: int
    bias: Tensor
    """Added to the scores of the last keys: broadcasts to [b, K, G, t, <= s]."""


class Strip:
    """The bias of every block of queries, as a view of one tensor."""

    def __init__(self, tokens: int, window: int | None, scores: Scores, dtype: torch.dtype) -> None:
        """``tokens``: the longest row or document."""
        self.window = window
        # Causality alone shows only in the last keys of a block, and a window in those that it can reach.
        past = 0 if scores.slopes_KG is None else tokens
        self.past = past if window is None else min(tokens, window + BLOCK_TOKENS)
        distance = torch.arange(BLOCK_TOKENS)[:, None] + self.past - torch.arange(self.past + BLOCK_TOKENS)
        self.bias = bias_of_distance(distance, window, scores, dtype=dtype)

    def at(self, tokens: int, past: int) -> Tensor:
        """The bias of ``tokens`` queries that have up to ``past`` keys before the first of them."""
        return self.bias[..., :tokens, self.past - min(past, self.past) : self.past + tokens]

    def spans(self, rows: slice, begin: int, end: int) -> list[Span]:
        """The spans of one document, or of whole rows."""
        found = []
        for first_query in range(begin, end, BLOCK_TOKENS):
            last = min(first_query + BLOCK_TOKENS, end)
            first_key = begin if self.window is None else max(begin, first_query - self.window + 1)
            found.append(Span(rows, first_query, last, first_key, self.at(last - first_query, first_query - first_key)))
        return found

    def packed(self, rows: slice, ends: list[int], begin: int = 0) -> list[Span]:
        """The spans of documents that follow each other in a row, up to ``ends``: short neighbours share one."""
        found: list[Span] = []
        together: list[int] = []
        for end in [*ends, None]:
            if together and (end is None or end - begin > BLOCK_TOKENS):
                found.append(self._shared(rows, begin, together))
                begin, together = together[-1], []
            if end is not None and end - begin > BLOCK_TOKENS:
                found += self.spans(rows, begin, end)
                begin = end
            elif end is not None:
                together.append(end)
        return found

    def _shared(self, rows: slice, begin: int, ends: list[int]) -> Span:
        tokens = ends[-1] - begin
        bias = self.at(tokens, 0)
        if len(ends) > 1:
            lengths = torch.tensor([end - start for start, end in zip([begin, *ends], ends, strict=False)])
            of_T = torch.arange(len(ends)).repeat_interleave(lengths)
            bias = bias.masked_fill(of_T[:, None] != of_T, -torch.inf)
        return Span(rows, begin, ends[-1], begin, bias)


class Spans:
    """Attention over spans that hold every token of a batch once as a query."""

    def __init__(self, spans: list[Span], scores: Scores, *, keep: bool) -> None:
        self.spans, self.scores, self.keep = spans, scores, keep

    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """[B, T, H, d]."""
        mixed_BTHd: Tensor = _OverSpans.apply(query_BHTd, key_BKTd, value_BKTd, self)
        return mixed_BTHd


class _OverSpans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, over: Spans) -> Tensor:
        (batch, heads, time, width), groups = query_BHTd.shape, key_BKTd.shape[1]
        key_BKTd, value_BKTd = key_BKTd.contiguous(), value_BKTd.contiguous()
        query_BKGTd = (query_BHTd * over.scores.scale).unflatten(1, (groups, -1))
        out_BTHd = query_BHTd.new_empty(batch, time, heads, width)
        out_BKGTd = out_BTHd.transpose(1, 2).unflatten(1, (groups, -1))
        kept = []
        for span in over.spans:
            probability_bKgs, _ = _probabilities(query_BKGTd, key_BKTd, span, over.scores)
            mixed_bKgd = probability_bKgs @ value_BKTd[span.rows, :, span.first : span.end]
            out_BKGTd[span.rows, :, :, span.begin : span.end] = mixed_bKgd.unflatten(2, (-1, span.end - span.begin))
            if over.keep:
                kept.append(probability_bKgs)
        ctx.over = over
        ctx.save_for_backward(query_BKGTd, key_BKTd, value_BKTd, *kept)
        return out_BTHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BKGTd, key_BKTd, value_BKTd, *kept = ctx.saved_tensors
        over: Spans = ctx.over
        grad_BKGTd = grad_BTHd.transpose(1, 2).unflatten(1, (query_BKGTd.shape[1], -1))
        d_query_BTHd = torch.empty_like(grad_BTHd, memory_format=torch.contiguous_format)
        d_query_BKGTd = d_query_BTHd.transpose(1, 2).unflatten(1, (query_BKGTd.shape[1], -1))
        sums = torch.promote_types(key_BKTd.dtype, torch.float32)
        d_key_BKTd = torch.zeros_like(key_BKTd, dtype=sums)
        d_value_BKTd = torch.zeros_like(value_BKTd, dtype=sums)
        for index, span in enumerate(over.spans):
            rows, begin, end = span.rows, span.begin, span.end
            keys = (rows, slice(None), slice(span.first, end))
            if kept:
                probability_bKgs, slope_bKgs = kept[index], None
            else:
                probability_bKgs, slope_bKgs = _probabilities(query_BKGTd, key_BKTd, span, over.scores)
            grad_bKgd = grad_BKGTd[rows, :, :, begin:end].flatten(2, 3)
            d_value_BKTd[keys] += probability_bKgs.transpose(-2, -1) @ grad_bKgd
            d_probability_bKgs = grad_bKgd @ value_BKTd[keys].transpose(-2, -1)
            d_score_bKgs = torch._softmax_backward_data(
                d_probability_bKgs, probability_bKgs, -1, probability_bKgs.dtype
            )
            if slope_bKgs is not None:
                d_score_bKgs *= slope_bKgs
            d_rows_bKgd = (d_score_bKgs @ key_BKTd[keys]).mul_(over.scores.scale)
            d_query_BKGTd[rows, :, :, begin:end] = d_rows_bKgd.unflatten(2, (-1, end - begin))
            d_key_BKTd[keys] += d_score_bKgs.transpose(-2, -1) @ query_BKGTd[rows, :, :, begin:end].flatten(2, 3)
        dtype = key_BKTd.dtype
        return d_query_BTHd.transpose(1, 2), d_key_BKTd.to(dtype), d_value_BKTd.to(dtype), None


def _probabilities(query_BKGTd: Tensor, key_BKTd: Tensor, span: Span, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """[b, K, g, s], and the derivative of the soft cap where there is one."""
    rows, begin, end = span.rows, span.begin, span.end
    score_bKgs = query_BKGTd[rows, :, :, begin:end].flatten(2, 3) @ key_BKTd[rows, :, span.first : end].transpose(
        -2, -1
    )
    slope_bKgs = None
    if not scores.plain:
        score_bKgs = score_bKgs.to(torch.promote_types(score_bKgs.dtype, torch.float32))
    if scores.cap is not None:
        bent_bKgs = score_bKgs.div_(scores.cap).tanh_()
        slope_bKgs = (1 - bent_bKgs.square()).to(query_BKGTd.dtype)
        score_bKgs = bent_bKgs * scores.cap
    seen = span.bias.shape[-1]
    score_bKgs.unflatten(2, (-1, end - begin))[..., -seen:].add_(span.bias)
    return score_bKgs.softmax(dim=-1).to(query_BKGTd.dtype), slope_bKgs
