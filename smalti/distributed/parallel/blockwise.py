"""Attention of some queries over blocks of keys, one block after the other (online softmax).

Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135. Products are in the dtype of the
inputs, everything else in float32 (or wider).

Shapes: B rows, T tokens of a row, t queries, s keys, q and u those of a tile, K key/value heads, G query heads for
each, d width of a head, g = G q.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from smalti.model.blocks.attention.scores import Scores, bias_of_distance, document_runs

_TILE_ON_CPU, _TILE = (128, 1024), (1024, 2048)
"""Maximum number of queries and of keys of a tile. On a CPU, its scores fit into the cache."""


class Chunk(NamedTuple):
    """Consecutive tokens of a row."""

    first: int
    """Position of the first token in the row."""
    at: int
    """Index of the same token in the tensor that holds the chunk."""
    tokens: int


class Tile(NamedTuple):
    """Some queries by some keys, as slices of the tensors that hold them. One tile of scores exists at a time."""

    queries: slice
    keys: slice
    first_query: int
    """Position of its first query in the row."""
    first_key: int
    masked: bool
    """True if some of these keys are hidden from some of these queries."""


class Documents:
    """Start of each token's document, [B, T]; and on the CPU its minimum and maximum over the rows.

    Reading them from an accelerator would wait for it.
    """

    def __init__(self, documents_BT: Tensor) -> None:
        along_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        self.begin_BT = torch.where(document_runs(documents_BT), along_T, 0).cummax(dim=1).values
        self.on_cpu = documents_BT.device.type == "cpu"
        if self.on_cpu:
            self.min_begin_T: list[int] = self.begin_BT.amin(dim=0).tolist()
            self.max_begin_T: list[int] = self.begin_BT.amax(dim=0).tolist()


class Blockwise:
    """Computes attention scores per tile and lists the tiles that are not fully masked.

    A score is that of ``model.blocks.attention.scores``, with windows, packed documents, ALiBi and soft cap. Tiles are
    left out by causality and window; by documents only where these are on the CPU.
    """

    def __init__(self, scores: Scores, window: int | None, documents: Documents | None, device: torch.device) -> None:
        self.scores, self.window, self.documents = scores, window, documents
        self.tile = _TILE_ON_CPU if device.type == "cpu" else _TILE

    def tiles(self, queries: list[Chunk], keys: list[Chunk]) -> list[Tile]:
        """Return the tiles of all chunks of queries by all chunks of keys that are not fully masked."""
        max_queries, max_keys = self.tile
        tiles: list[Tile] = []
        for query in queries:
            for first in range(query.first, query.first + query.tokens, max_queries):
                last = min(first + max_queries, query.first + query.tokens) - 1
                at = query.at + first - query.first
                for key in keys:
                    begin, end = max(key.first, self._reach(first)), min(key.first + key.tokens, last + 1)
                    for first_key in range(begin, end, max_keys):
                        end_key = min(first_key + max_keys, end)
                        at_key = key.at + first_key - key.first
                        tiles.append(
                            Tile(
                                slice(at, at + last + 1 - first),
                                slice(at_key, at_key + end_key - first_key),
                                first,
                                first_key,
                                self._hides(first, last, first_key, end_key - 1),
                            )
                        )
        return tiles

    def _reach(self, query: int) -> int:
        """Return the first key that a query, or any after it, can attend to."""
        reach = 0 if self.window is None else query - self.window + 1
        return max(reach, self.documents.min_begin_T[query]) if self.documents and self.documents.on_cpu else reach

    def _hides(self, first: int, last: int, first_key: int, last_key: int) -> bool:
        by_causality = last_key > first
        by_window = self.window is not None and last - first_key >= self.window
        by_document = self.documents is not None and (
            not self.documents.on_cpu or self.documents.max_begin_T[last] > first_key
        )
        return by_causality or by_window or by_document

    def scores_of_tile(self, query_BKGqd: Tensor, key_BKud: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return the scores [B, K, g, u] in float32, before the softmax, and the derivative of the soft cap, if any."""
        score_BKgu = query_BKGqd.flatten(2, 3) @ key_BKud.transpose(-2, -1)
        score_BKgu = score_BKgu.to(torch.promote_types(score_BKgu.dtype, torch.float32)).mul_(self.scores.scale)
        slope_BKgu = None
        if self.scores.cap is not None:
            bent_BKgu = score_BKgu.div_(self.scores.cap).tanh_()
            slope_BKgu = 1 - bent_BKgu.square()
            score_BKgu = bent_BKgu.mul_(self.scores.cap)
        if tile.masked or self.scores.slopes_KG is not None:
            n_queries = tile.queries.stop - tile.queries.start
            score_BKgu.unflatten(2, (-1, n_queries)).add_(self._bias(tile, score_BKgu))
        return score_BKgu, slope_BKgu

    def _bias(self, tile: Tile, like: Tensor) -> Tensor:
        n_queries, n_keys = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        key_u = torch.arange(tile.first_key, tile.first_key + n_keys, device=like.device)
        query_q = torch.arange(tile.first_query, tile.first_query + n_queries, device=like.device)
        distance, unseen = query_q[:, None] - key_u, None
        if self.documents is not None:
            begin_Bq = self.documents.begin_BT[:, tile.first_query : tile.first_query + n_queries]
            unseen = key_u < begin_Bq[:, :, None]
            distance = distance.expand_as(unseen)
        bias = bias_of_distance(distance, self.window, self.scores, unseen, dtype=like.dtype)
        return bias[:, None, None] if bias.dim() == 3 else bias


class Sums:
    """Partial attention output of t queries after some blocks of keys.

    Maxima, sums and outputs are in float32, and are corrected with each block.
    """

    def __init__(self, query_BKGtd: Tensor) -> None:
        wide = torch.promote_types(query_BKGtd.dtype, torch.float32)
        self.out_BKGtd = torch.zeros_like(query_BKGtd, dtype=wide, memory_format=torch.contiguous_format)
        self.sum_BKGt = self.out_BKGtd.new_zeros(query_BKGtd.shape[:-1])
        self.top_BKGt = torch.full_like(self.sum_BKGt, -torch.inf)

    def add(
        self, blockwise: Blockwise, tiles: list[Tile], query_BKGtd: Tensor, key_BKsd: Tensor, value_BKsd: Tensor
    ) -> None:
        """Add one block of keys."""
        for tile in tiles:
            queries = (..., tile.queries)
            query_BKGqd = query_BKGtd[..., tile.queries, :]
            score_BKgu, _ = blockwise.scores_of_tile(query_BKGqd, key_BKsd[:, :, tile.keys], tile)
            score_BKGqu = score_BKgu.unflatten(2, query_BKGqd.shape[2:4])
            top_BKGq = torch.maximum(self.top_BKGt[queries], score_BKGqu.amax(dim=-1))
            # The maximum of a query without any key so far is -inf, and -inf - -inf is NaN.
            safe_BKGq = top_BKGq.clamp(min=torch.finfo(top_BKGq.dtype).min)
            probability_BKGqu = score_BKGqu.sub_(safe_BKGq[..., None]).exp_()
            fade_BKGq = (self.top_BKGt[queries] - safe_BKGq).exp_()
            mixed_BKgd = probability_BKGqu.flatten(2, 3).to(value_BKsd.dtype) @ value_BKsd[:, :, tile.keys]
            self.sum_BKGt[queries] = self.sum_BKGt[queries] * fade_BKGq + probability_BKGqu.sum(dim=-1)
            out_BKGqd = self.out_BKGtd[..., tile.queries, :]
            out_BKGqd.mul_(fade_BKGq[..., None]).add_(mixed_BKgd.view_as(out_BKGqd))
            self.top_BKGt[queries] = top_BKGq

    def done(self) -> tuple[Tensor, Tensor]:
        """Return the output [B, K, G, t, d] and the log of the sums [B, K, G, t], both float32."""
        return self.out_BKGtd / self.sum_BKGt[..., None], self.top_BKGt + self.sum_BKGt.log()


class Gradients:
    """Gradients of t queries after some blocks of keys; ``add`` returns those of a block's keys and values.

    The scores are computed again from the log of the sums.
    """

    def __init__(self, query_BKGtd: Tensor, grad_BKGtd: Tensor, out_BKGtd: Tensor, log_sum_BKGt: Tensor) -> None:
        wide = log_sum_BKGt.dtype
        self.query_BKGtd, self.grad_BKGtd, self.log_sum_BKGt = query_BKGtd, grad_BKGtd, log_sum_BKGt
        self.d_query_BKGtd = torch.zeros_like(query_BKGtd, dtype=wide, memory_format=torch.contiguous_format)
        self.share_BKGt = (grad_BKGtd.to(wide) * out_BKGtd).sum(dim=-1)

    def add(self, blockwise: Blockwise, tiles: list[Tile], key_BKsd: Tensor, value_BKsd: Tensor) -> Tensor:
        """Add a block, and return the gradients of its keys and values: [2, B, K, s, d], float32."""
        d_pair = self.d_query_BKGtd.new_zeros((2, *key_BKsd.shape))
        for tile in tiles:
            query_BKGqd, key_BKud = self.query_BKGtd[..., tile.queries, :], key_BKsd[:, :, tile.keys]
            log_sum_BKg1, share_BKg1 = (
                each[..., tile.queries].flatten(2, 3)[..., None] for each in (self.log_sum_BKGt, self.share_BKGt)
            )
            score_BKgu, slope_BKgu = blockwise.scores_of_tile(query_BKGqd, key_BKud, tile)
            probability_BKgu = score_BKgu.sub_(log_sum_BKg1).exp_()
            grad_BKgd = self.grad_BKGtd[..., tile.queries, :].flatten(2, 3)
            d_pair[1][:, :, tile.keys] += probability_BKgu.to(grad_BKgd.dtype).transpose(-2, -1) @ grad_BKgd
            d_score_BKgu = (grad_BKgd @ value_BKsd[:, :, tile.keys].transpose(-2, -1)).to(probability_BKgu.dtype)
            d_score_BKgu = d_score_BKgu.sub_(share_BKg1).mul_(probability_BKgu).mul_(blockwise.scores.scale)
            if slope_BKgu is not None:
                d_score_BKgu.mul_(slope_BKgu)
            d_score_BKgu = d_score_BKgu.to(key_BKud.dtype)
            self.d_query_BKGtd[..., tile.queries, :] += (d_score_BKgu @ key_BKud).view_as(query_BKGqd)
            d_pair[0][:, :, tile.keys] += d_score_BKgu.transpose(-2, -1) @ query_BKGqd.flatten(2, 3)
        return d_pair
