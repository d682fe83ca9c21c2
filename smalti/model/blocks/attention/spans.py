"""Attention on the CPU as plain matrix products over spans: queries and the keys that they attend to.

torch's fused CPU kernel recomputes the scores in its backward pass, takes only whole [T, T] masks, and has no soft cap.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads, G = H / K, d width of a head, b rows of a span, t
its queries, s its keys, g = G t.
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
    """The bias of every block of queries, as a view of one tensor [128, T + 128] for all blocks and layers.

    That is enough because causality, window and ALiBi depend on distances alone.
    """

    def __init__(self, tokens: int, window: int | None, scores: Scores, dtype: torch.dtype) -> None:
        """``tokens``: length of the longest row or document."""
        self.window = window
        # Causality alone masks only the last keys of a block, and a window only those that it can reach.
        past = 0 if scores.slopes_KG is None else tokens
        self.past = past if window is None else min(tokens, window + BLOCK_TOKENS)
        distance = torch.arange(BLOCK_TOKENS)[:, None] + self.past - torch.arange(self.past + BLOCK_TOKENS)
        self.bias = bias_of_distance(distance, window, scores, dtype=dtype)

    def at(self, tokens: int, past: int) -> Tensor:
        """Return the bias of ``tokens`` queries with up to ``past`` keys before the first of them."""
        return self.bias[..., :tokens, self.past - min(past, self.past) : self.past + tokens]

    def spans(self, rows: slice, begin: int, end: int) -> list[Span]:
        """Return the spans of one document, or of whole rows."""
        spans = []
        for first_query in range(begin, end, BLOCK_TOKENS):
            last = min(first_query + BLOCK_TOKENS, end)
            first_key = begin if self.window is None else max(begin, first_query - self.window + 1)
            spans.append(Span(rows, first_query, last, first_key, self.at(last - first_query, first_query - first_key)))
        return spans

    def packed(self, rows: slice, ends: list[int], begin: int = 0) -> list[Span]:
        """Return the spans of consecutive documents of a row that end at ``ends``.

        Consecutive short documents share a span, with a mask of at most [128, 128].
        """
        spans: list[Span] = []
        short_ends: list[int] = []
        for end in [*ends, None]:
            if short_ends and (end is None or end - begin > BLOCK_TOKENS):
                spans.append(self._shared(rows, begin, short_ends))
                begin, short_ends = short_ends[-1], []
            if end is not None and end - begin > BLOCK_TOKENS:
                spans += self.spans(rows, begin, end)
                begin = end
            elif end is not None:
                short_ends.append(end)
        return spans

    def _shared(self, rows: slice, begin: int, ends: list[int]) -> Span:
        tokens = ends[-1] - begin
        bias = self.at(tokens, 0)
        if len(ends) > 1:
            lengths = torch.tensor([end - start for start, end in zip([begin, *ends], ends, strict=False)])
            of_T = torch.arange(len(ends)).repeat_interleave(lengths)
            bias = bias.masked_fill(of_T[:, None] != of_T, -torch.inf)
        return Span(rows, begin, ends[-1], begin, bias)


class Spans:
    """Attention over spans that contain every token of a batch once as a query.

    Keys outside a span are not computed. The scores are rounded to the input's dtype before the softmax, as in
    transformers' eager attention; with ALiBi or a soft cap they are in float32 from there on. Sums have a fixed order,
    so every call gives the same bits. ``keep``: save the probabilities for backward instead of recomputing them.
    """

    def __init__(self, spans: list[Span], scores: Scores, *, keep: bool) -> None:
        self.spans, self.scores, self.keep = spans, scores, keep

    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
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
        saved = []
        for span in over.spans:
            probability_bKgs, _ = _probabilities(query_BKGTd, key_BKTd, span, over.scores)
            mixed_bKgd = probability_bKgs @ value_BKTd[span.rows, :, span.first : span.end]
            out_BKGTd[span.rows, :, :, span.begin : span.end] = mixed_bKgd.unflatten(2, (-1, span.end - span.begin))
            if over.keep:
                saved.append(probability_bKgs)
        ctx.over = over
        ctx.save_for_backward(query_BKGTd, key_BKTd, value_BKTd, *saved)
        return out_BTHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BKGTd, key_BKTd, value_BKTd, *saved = ctx.saved_tensors
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
            if saved:
                probability_bKgs, slope_bKgs = saved[index], None
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
    """Return the probabilities [b, K, g, s], and the derivative of the soft cap or None."""
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
