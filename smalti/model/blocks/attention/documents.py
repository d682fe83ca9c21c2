"""Attention over packed rows on the CPU: a loop over documents, without a mask over the row.

Consecutive short documents share a span of up to 128 queries, because many small documents would be many small matrix
products. docs/concepts/model/attention.md has measurements against one mask over the row.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads, d width of a head.
"""

from itertools import groupby

import torch
from torch import Tensor

from smalti.model.blocks.attention.scores import Attend, Scores, bias_of_rows, document_runs
from smalti.model.blocks.attention.sdpa import Fused
from smalti.model.blocks.attention.spans import BLOCK_TOKENS, Span, Spans, Strip


def whole_rows(like_BTD: Tensor, window: int | None, scores: Scores, *, keep: bool) -> Spans:
    """Build the kernel of rows that are one document each."""
    tokens = like_BTD.shape[1]
    return Spans(Strip(tokens, window, scores, like_BTD.dtype).spans(slice(None), 0, tokens), scores, keep=keep)


def masked_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor, *, keep: bool) -> Spans:
    """Build the kernel of packed rows with one mask over whole rows."""
    tokens = like_BTD.shape[1]
    bias = bias_of_rows(like_BTD, window, scores, documents_BT)
    bias = bias if bias.dim() == 5 else bias[:, None, None]
    blocks = [(begin, min(begin + BLOCK_TOKENS, tokens)) for begin in range(0, tokens, BLOCK_TOKENS)]
    spans = [Span(slice(None), begin, end, 0, bias[..., begin:end, :end]) for begin, end in blocks]
    return Spans(spans, scores, keep=keep)


class Documents:
    """The kernel of packed rows: documents of more than ``longest_tokens`` by torch's fused kernel, if their scores are
    plain and no window is shorter; the others by spans."""

    def __init__(
        self,
        like_BTD: Tensor,
        window: int | None,
        scores: Scores,
        documents_BT: Tensor,
        *,
        keep: bool,
        longest_tokens: int,
    ) -> None:
        tokens = like_BTD.shape[1]
        strip = Strip(tokens, window, scores, like_BTD.dtype)
        ends = [[*begins_T.nonzero()[1:, 0].tolist(), tokens] for begins_T in document_runs(documents_BT)]

        def is_fused(document: tuple[int, int]) -> bool:
            length = document[1] - document[0]
            return scores.plain and length > longest_tokens and (window is None or length <= window)

        def parts(of_row: list[int]) -> list[tuple[int, Attend]]:
            kernels: list[tuple[int, Attend]] = []
            for fused, group in groupby(zip([0, *of_row], of_row, strict=False), is_fused):
                documents = list(group)
                if fused:
                    kernels += [(end - begin, Fused(scores.scale)) for begin, end in documents]
                else:
                    first, last = documents[0][0], documents[-1][1]
                    spans = strip.packed(slice(None), [end - first for _, end in documents])
                    kernels.append((last - first, Spans(spans, scores, keep=keep)))
            return kernels

        self._rows, self._together = [], None
        if any(is_fused(document) for of_row in ends for document in zip([0, *of_row], of_row, strict=False)):
            self._rows = [parts(of_row) for of_row in ends]
        else:
            of_rows = [strip.packed(slice(row, row + 1), of_row) for row, of_row in enumerate(ends)]
            self._together = Spans([span for spans in of_rows for span in spans], scores, keep=keep)

    @torch._disable_dynamo  # each batch has other documents and would be recompiled
    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """Return [B, T, H, d]."""
        if self._together is not None:
            return self._together(query_BHTd, key_BKTd, value_BKTd)
        mixed: list[Tensor] = []
        for parts, *of_row in zip(self._rows, query_BHTd, key_BKTd, value_BKTd, strict=True):
            lengths = [length for length, _ in parts]
            pieces = zip(*(heads_KTd.split(lengths, dim=1) for heads_KTd in of_row), strict=True)
            mixed.append(torch.cat([attend(*(piece[None] for piece in inputs)) for (_, attend), inputs
                                    in zip(parts, pieces, strict=True)], dim=1))  # fmt: skip
        return torch.cat(mixed)
