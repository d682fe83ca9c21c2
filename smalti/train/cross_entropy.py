"""Cross-entropy of an output head with bounded memory: one tile of logits at a time.

Guarantees: loss and gradients equal those of ``F.cross_entropy(soft_cap(hidden @ weight^T), targets)`` up to rounding;
the memory is ``chunk_bytes`` for the logits of one *tile* (some tokens by a part of the vocabulary) and a few tensors
like ``hidden``; nothing waits for a GPU.

Shapes: N tokens, D hidden, V vocabulary (of this rank, where ranks share it); C tokens and U vocabulary of a tile.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.base.errors import DataError
from smalti.distributed.parallel.slices import Ranks, all_gather_stacked
from smalti.distributed.parallel.tensor import head_shard
from smalti.train.batches import IGNORE


class _Options(NamedTuple):
    z_loss_coef: float
    soft_cap: float | None
    chunk_bytes: int
    ranks: Ranks | None = None
    """The ranks that share the vocabulary; None: it is whole."""


def cross_entropy_head(
    targets_BT: Tensor, *, z_loss_coef: float = 0.0, soft_cap: float | None = None, chunk_bytes: int = 2**28
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a head for ``Decoder.forward``: (hidden_BTD, weight_VD) -> (cross-entropy + z-loss, z-loss), fp32 sums.

    If ranks share the weight, each returns the whole sums, and the gradients of its part: those of hidden must be
    summed.
    Targets equal to IGNORE do not count; others outside the vocabulary raise DataError (on a GPU a device assertion).
    The z-loss of a token is z_loss_coef log(Z)^2 (PaLM, arXiv 2204.02311, section 5); the second value is for the log
    and has no gradient. soft_cap: the bound of ``model.final_logit_softcapping``.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        shard = head_shard(weight_VD)
        check_targets(targets_BT, weight_VD.shape[0])
        options = _Options(z_loss_coef, soft_cap, chunk_bytes, shard.ranks)
        hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        rows_C = counted_rows(targets_N != IGNORE)
        if rows_C is not None:
            hidden_ND, targets_N = hidden_ND.index_select(0, rows_C), targets_N.index_select(0, rows_C)
        counted_N1 = (targets_N != IGNORE)[:, None]
        return _ChunkedCrossEntropy.apply(
            hidden_ND, shard.weight, targets_N - shard.first, counted_N1, options, torch.is_grad_enabled()
        )

    return head


def counted_rows(counted_N: Tensor) -> Tensor | None:
    """Return the indexes of the tokens that count, so that a head computes no logits of the others; None: take all.

    Only on a CPU, and where some do not count: elsewhere the number of indexes would be waited for.
    """
    if counted_N.device.type != "cpu" or not (~counted_N).any():  # false in a rehearsal, whose values are unknown
        return None
    return counted_N.nonzero()[:, 0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sums of cross-entropy and z-loss over tiles.

    The gradient is computed in the forward pass, from a tile's probabilities while they are in memory (as in fused
    linear cross-entropy, arXiv 2410.10989). Tiles are cut

    - not at all, if all logits fit;
    - along tokens, if the weight's gradient can be accumulated over tiles: in place for weights in fp32; for others in
      an additional fp32 tensor of at most half of ``chunk_bytes``. Each logit is computed once: three products, as in
      plain cross-entropy;
    - along the vocabulary, if that tensor is too large (and accumulating in bf16 would lose small values). A part of
      the vocabulary takes all tokens in one product, which accumulates in fp32. The log-partition over all parts must
      be known first (as in arXiv 2411.09009), so each logit is computed twice: four products.

    If ranks share the vocabulary (``distributed/parallel/tensor.py``), each computes the logits of its part; one
    all-gather for the tokens of a tile exchanges the log-partition and the target's logit of each part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        counted_N1: Tensor,
        options: _Options,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the sums, and save the gradients. ``targets_N`` are relative to the first row of ``weight_VD``."""
        for_hidden, for_weight = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        tokens, entries = _cut(hidden_ND, weight_VD, options, for_weight=for_weight)
        grad_hidden_ND = _zeros(hidden_ND, parts=-(-weight_VD.shape[0] // entries)) if for_hidden else None
        grad_weight_VD = _zeros(weight_VD, parts=-(-hidden_ND.shape[0] // tokens)) if for_weight else None
        total, z_loss = (hidden_ND.new_zeros((), dtype=torch.float32) for _ in range(2))
        for rows in _slices(hidden_ND.shape[0], tokens):
            hidden_CD, targets_C, counted_C = hidden_ND[rows], targets_N[rows], counted_N1[rows, 0]
            tiles = [
                _Tile(hidden_CD, weight_VD[columns], targets_C - columns.start, options)
                for columns in _slices(weight_VD.shape[0], entries)
            ]
            own_C, picked_C = _over_tiles([tile.sums(keep=len(tiles) == 1) for tile in tiles])
            log_partition_C, picked_C = _over_ranks(own_C, picked_C, options.ranks)
            z_chunk = options.z_loss_coef * (log_partition_C.square() * counted_C).sum()
            total += ((log_partition_C - picked_C) * counted_C).sum() + z_chunk
            z_loss += z_chunk
            if grad_hidden_ND is None and grad_weight_VD is None:
                continue
            read_CD = hidden_CD * counted_N1[rows]  # ignored targets contribute to neither product
            for tile, columns in zip(tiles, _slices(weight_VD.shape[0], entries), strict=True):
                grad_CU = tile.gradient(log_partition_C)
                if grad_hidden_ND is not None:
                    _add_product(grad_hidden_ND[rows], grad_CU, tile.weight_UD)
                if grad_weight_VD is not None:
                    _add_product(grad_weight_VD[columns], grad_CU.T, read_CD)
                del grad_CU  # before the next tile's logits
        ctx.mark_non_differentiable(z_loss)
        ctx.save_for_backward(
            None if grad_hidden_ND is None else grad_hidden_ND.mul_(counted_N1).to(hidden_ND.dtype),
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
        )
        return total, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _grad_z: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place, as a copy would be as large as the weight; a second backward pass through
        the graph raises an error of torch."""
        return (*(None if saved is None else saved.mul_(grad_total) for saved in ctx.saved_tensors), *(None,) * 4)


class _Tile:
    """A tile: some tokens by a part of the vocabulary, to whose first entry ``targets_C`` are relative."""

    def __init__(self, hidden_CD: Tensor, weight_UD: Tensor, targets_C: Tensor, options: _Options) -> None:
        self.weight_UD = weight_UD
        self._hidden_CD = hidden_CD
        self._options = options
        self._inside_C1 = ((targets_C >= 0) & (targets_C < weight_UD.shape[0]))[:, None]
        self._index_C1 = targets_C.clamp(0, weight_UD.shape[0] - 1)[:, None]
        self._kept: tuple[Tensor, Tensor, Tensor | None] | None = None

    def sums(self, *, keep: bool) -> tuple[Tensor, Tensor]:
        """Return log(sum(exp(logits))) of each token, and the logit of its target, 0 if that is in another tile.

        keep: keep the probabilities for ``gradient``.
        """
        logits_CU, tanh_CU = self._logits()
        probability_CU = torch.softmax(logits_CU, dim=-1, dtype=torch.float32)
        # log Z = logit - log p at the largest p, which cannot underflow; cheaper than logsumexp + exp, and two amax
        # cheaper than one max with its index.
        log_partition_C = logits_CU.amax(dim=-1).float() - probability_CU.amax(dim=-1).log()
        picked_C = (logits_CU.gather(1, self._index_C1) * self._inside_C1)[:, 0].float()
        if keep:
            self._kept = probability_CU, log_partition_C, tanh_CU
        return log_partition_C, picked_C

    def gradient(self, log_partition_C: Tensor) -> Tensor:
        """Return d(loss)/d(hidden @ weight^T), [C, U], from the log-partition over all tiles; call it once.

        d/dlogits = softmax (1 + 2 z log Z) - onehot; through c tanh(x / c) it is times 1 - tanh^2.
        """
        if self._kept is None:
            logits_CU, tanh_CU = self._logits()
            grad_CU = logits_CU.float()
            del logits_CU
            grad_CU.sub_(log_partition_C[:, None]).exp_()
        else:
            (grad_CU, own_C, tanh_CU) = self._kept
            self._kept = None
            if self._options.ranks is not None:  # normalise the probabilities of this part over the whole vocabulary
                grad_CU *= (own_C - log_partition_C).exp_()[:, None]
        if self._options.z_loss_coef:
            grad_CU *= (1 + 2 * self._options.z_loss_coef * log_partition_C)[:, None]
        grad_CU.scatter_add_(1, self._index_C1, -self._inside_C1.to(grad_CU.dtype))
        if tanh_CU is not None:
            grad_CU *= tanh_CU.square_().neg_().add_(1)
        return grad_CU.to(self._hidden_CD.dtype)

    def _logits(self) -> tuple[Tensor, Tensor | None]:
        return capped_logits(self._hidden_CD, self.weight_UD, self._options.soft_cap)


def capped_logits(hidden_CD: Tensor, weight_UD: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits; with a soft cap in fp32 (fp64 of fp64), with tanh(uncapped logit / cap) beside them."""
    logits_CU = hidden_CD @ weight_UD.T
    if soft_cap is None:
        return logits_CU, None
    tanh_CU = logits_CU.to(torch.promote_types(logits_CU.dtype, torch.float32)).div_(soft_cap).tanh_()
    return tanh_CU * soft_cap, tanh_CU


def _over_tiles(sums: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    log_partitions, picked = zip(*sums, strict=True)
    if len(sums) == 1:
        return log_partitions[0], picked[0]
    return torch.stack(log_partitions).logsumexp(dim=0), torch.stack(picked).sum(dim=0)


def _over_ranks(log_partition_C: Tensor, picked_C: Tensor, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    if ranks is None:
        return log_partition_C, picked_C
    log_partitions_WC, picked_WC = all_gather_stacked(torch.stack([log_partition_C, picked_C]), ranks).unbind(1)
    return log_partitions_WC.logsumexp(dim=0), picked_WC.sum(dim=0)


def _cut(hidden_ND: Tensor, weight_VD: Tensor, options: _Options, *, for_weight: bool) -> tuple[int, int]:
    """Return the tokens and vocabulary entries of a tile."""
    tokens, vocabulary = max(1, hidden_ND.shape[0]), weight_VD.shape[0]
    # The logit, in fp32 too, and its probability; with a soft cap three numbers in fp32.
    bytes_each = 12 if options.soft_cap is not None else 8 if hidden_ND.dtype == torch.float32 else 10
    logits = options.chunk_bytes // bytes_each
    if tokens * vocabulary <= logits:
        return tokens, vocabulary
    if for_weight and weight_VD.dtype != torch.float32:
        sum_bytes = weight_VD.numel() * (4 + weight_VD.element_size())  # and the product that is added
        if 2 * sum_bytes > options.chunk_bytes:
            return tokens, max(64, logits // tokens // 64 * 64)  # in whole strips of a matmul kernel
        logits = (options.chunk_bytes - sum_bytes) // bytes_each
    return max(1, logits // vocabulary), vocabulary


def _zeros(like: Tensor, *, parts: int) -> Tensor:
    """Return zeros to add ``parts`` products to, in fp32 if there are several."""
    return torch.zeros_like(like, dtype=torch.float32 if parts > 1 else None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def check_targets(targets_N: Tensor, vocabulary: int) -> None:
    """Raise DataError for a target that is neither IGNORE nor in the vocabulary; on a GPU it is a device assertion."""
    wrong_N = (targets_N != IGNORE) & ((targets_N < 0) | (targets_N >= vocabulary))
    if targets_N.device.type != "cpu":
        torch._assert_async(~wrong_N.any(), "a target of the loss is outside the vocabulary")
    elif wrong_N.any():
        raise DataError(
            f"target {int(targets_N[wrong_N][0])} of the loss is not in the vocabulary of {vocabulary:,} tokens",
            allowed=f"0 to {vocabulary - 1:,}, or {IGNORE} for a token that does not count",
        )
