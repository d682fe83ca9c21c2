"""Attention over packed rows on the CPU: a loop over documents, without a mask over the row.

Short neighbours share a span of up to 128 queries, so that a row of many small documents is not many small matmuls.
One layer, forward and backward, then forward alone, in ms; two cores of an AMD EPYC (Zen 5), torch 2.13, medians:

    B T H d, documents of        one mask, fused    one mask, spans    this loop
    8 512 6 64, 64       bf16    66    8            84   28            63   21
                         fp32    74   22            70   23            39   18
    8 512 6 64, 256      bf16    73    8            74   17            76   15
                         fp32    56   18            63   20            41   17
    2 1024 12 64, 64     bf16    91   14            74   28            45   15
    1 4096 12 64, 64     bf16    655  108           -                  85   26
    1 4096 12 64, 1000   bf16    610  90            -                  143  26
    16 256 4 32, 64      bf16    24    3            25   12            50   21
                         fp32    16    5            17    7            24   13

Hence the rule of ``choice``: rows of up to 256 tokens go through one mask, longer ones here; without a backward pass
the fused kernel takes rows of up to 512 tokens.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads, d width of a head.
"""

from itertools import groupby

import torch
from torch import Tensor

from smalti.model.blocks.attention.scores import Attend, Scores, bias_of_rows, document_runs
from smalti.model.blocks.attention.sdpa import Fused
from smalti.model.blocks.attention.spans import BLOCK_TOKENS, Span, Spans, Strip


def whole_rows(like_BTD: Tensor, window: int | None, scores: Scores, *, keep: bool) -> Spans:
    """Rows that are one document each."""
    tokens = like_BTD.shape[1]
    return Spans(Strip(tokens, window, scores, like_BTD.dtype).spans(slice(None), 0, tokens), scores, keep=keep)


def masked_rows(like_BTD: Tensor, window: int | None, scores: Scores, documents_BT: Tensor, *, keep: bool) -> Spans:
    """Packed rows all together, through one mask."""
    tokens = like_BTD.shape[1]
    bias = bias_of_rows(like_BTD, window, scores, documents_BT)
    bias = bias if bias.dim() == 5 else bias[:, None, None]
    blocks = [(begin, min(begin + BLOCK_TOKENS, tokens)) for begin in range(0, tokens, BLOCK_TOKENS)]
    spans = [Span(slice(None), begin, end, 0, bias[..., begin:end, :end]) for begin, end in blocks]
    return Spans(spans, scores, keep=keep)


class Documents:
    """Packed rows: documents of more than ``longest_tokens`` by torch's fused kernel, where their scores are plain and
    no window cuts them; the others by spans."""

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
            found: list[tuple[int, Attend]] = []
            for fused, group in groupby(zip([0, *of_row], of_row, strict=False), is_fused):
                documents = list(group)
                if fused:
                    found += [(end - begin, Fused(scores.scale)) for begin, end in documents]
                else:
                    first, last = documents[0][0], documents[-1][1]
                    spans = strip.packed(slice(None), [end - first for _, end in documents])
                    found.append((last - first, Spans(spans, scores, keep=keep)))
            return found

        self._rows, self._together = [], None
        if any(is_fused(document) for of_row in ends for document in zip([0, *of_row], of_row, strict=False)):
            self._rows = [parts(of_row) for of_row in ends]
        else:
            of_rows = [strip.packed(slice(row, row + 1), of_row) for row, of_row in enumerate(ends)]
            self._together = Spans([span for spans in of_rows for span in spans], scores, keep=keep)

    @torch.compiler.disable  # every batch has other documents, and each would be compiled anew
    def __call__(self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
        """[B, T, H, d]."""
        if self._together is not None:
            return self._together(query_BHTd, key_BKTd, value_BKTd)
        mixed: list[Tensor] = []
        for parts, *of_row in zip(self._rows, query_BHTd, key_BKTd, value_BKTd, strict=True):
            lengths = [length for length, _ in parts]
            pieces = zip(*(heads_KTd.split(lengths, dim=1) for heads_KTd in of_row), strict=True)
            mixed.append(torch.cat([attend(*(piece[None] for piece in inputs)) for (_, attend), inputs
                                    in zip(parts, pieces, strict=True)], dim=1))  # fmt: skip
        return torch.cat(mixed)
