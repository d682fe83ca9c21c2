"""Ring attention: each rank keeps its queries and receives the keys and values of the others one rank at a time.

Liu et al. 2023, arXiv:2310.01889; docs/concepts/distributed/sequence-parallel.md. All sums are added in a fixed order.

Shapes: B rows, T tokens of a row, t tokens of it on this rank, n ranks, H query heads, K key/value heads, G = H / K, d
width of a head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from smalti.config.model import ModelConfig
from smalti.cost.layout.collectives import ring_turns
from smalti.distributed.parallel.blockwise import Blockwise, Chunk, Documents, Gradients, Sums, Tile
from smalti.model.blocks.attention.choice import windows_of
from smalti.model.blocks.attention.scores import Attend, HeadPart, scores_of


class Ring:
    """A ``kernels_of`` for a decoder whose rows are split over the ranks of ``group``; ``part``: the heads of them all.

    Any number of heads is allowed.
    """

    def __init__(self, group: dist.ProcessGroup, part: HeadPart) -> None:
        self.group, self.part = group, part

    def __call__(
        self, config: ModelConfig, like_BtD: Tensor, documents_BT: Tensor | None, n_documents: int | None = None
    ) -> dict[int | None, Attend]:
        """Return window -> attention kernel, for the layers with that window in this batch."""
        device, tokens = like_BtD.device, like_BtD.shape[1]
        scores = scores_of(config, device, self.part)
        documents = None if documents_BT is None else Documents(documents_BT)
        return {
            window: _Attend(self.group, Blockwise(scores, window, documents, device), tokens)
            for window in windows_of(config)
        }


def chunks(local_rank: int, ranks: int, tokens: int) -> list[Chunk]:
    """Return the two chunks, together ``tokens``, of each row that rank ``local_rank`` of the group holds.

    A row is cut into two chunks per rank, and rank r has the r-th of them and the r-th from the end, so that under
    causality all ranks have the same work in each turn (Llama 3, arXiv:2407.21783, section 3.3.2).
    """
    half = tokens // 2
    return [Chunk(number * half, at * half, half) for at, number in enumerate((local_rank, 2 * ranks - 1 - local_rank))]


class _Attend:
    """An ``Attend`` over the rows of a batch, for the layers of one window.

    In turn s a rank attends over the chunks of the rank s places before it, while those of turn s + 1 are received.
    Their owner sends them; they are not forwarded from neighbour to neighbour: the number of bytes is the same, and
    turns in which the window hides all keys from all ranks are left out.
    """

    def __init__(self, group: dist.ProcessGroup, blockwise: Blockwise, tokens: int) -> None:
        self.group, self.blockwise = group, blockwise
        ranks, local_rank = group.size(), group.rank()
        self.turns = [0, *ring_turns(tokens * ranks, ranks, blockwise.window)]
        queries = chunks(local_rank, ranks, tokens)
        self.tiles: list[list[Tile]] = [
            blockwise.tiles(queries, chunks((local_rank - turn) % ranks, ranks, tokens)) for turn in self.turns
        ]

    @torch._disable_dynamo  # the documents differ in every batch, which would recompile
    def __call__(self, query_BHtd: Tensor, key_BKtd: Tensor, value_BKtd: Tensor) -> Tensor:
        """Return the attention output [B, t, H, d]."""
        mixed_BtHd: Tensor = _OverRing.apply(query_BHtd, key_BKtd, value_BKtd, self)
        return mixed_BtHd

    def pairs(self, pair: Tensor) -> Iterator[tuple[int, list[Tile], Tensor]]:
        """Yield turn, tiles, and keys and values [2, B, K, t, d] of each turn while those of the next are received."""
        wait: Callable[[], Tensor] = lambda: pair  # noqa: E731
        for index, turn in enumerate(self.turns):
            received = wait()
            if index + 1 < len(self.turns):
                after = self.turns[index + 1]
                wait = self.exchange(pair, send_offset=after, recv_offset=-after)
            yield turn, self.tiles[index], received

    def exchange(self, sent: Tensor, *, send_offset: int, recv_offset: int) -> Callable[[], Tensor]:
        """Start the send and receive; the returned function waits and returns the received tensor.

        Offsets are added to this rank's position in the group, modulo its size.
        """
        ranks, local_rank = self.group.size(), self.group.rank()
        received = torch.empty_like(sent)
        target = dist.get_global_rank(self.group, (local_rank + send_offset) % ranks)
        source = dist.get_global_rank(self.group, (local_rank + recv_offset) % ranks)
        work = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, target, self.group), dist.P2POp(dist.irecv, received, source, self.group)]
        )

        def wait() -> Tensor:
            for request in work:
                request.wait()
            return received

        return wait


class _OverRing(torch.autograd.Function):
    """Saves query, key and value of this rank, its output and the logs of its sums.

    Backward receives the keys and values once more, and sends their gradients, in float32, back to their owner.
    """

    @staticmethod
    def forward(ctx: Any, query_BHtd: Tensor, key_BKtd: Tensor, value_BKtd: Tensor, over: _Attend) -> Tensor:
        query_BKGtd = query_BHtd.unflatten(1, (key_BKtd.shape[1], -1))
        pair = torch.stack((key_BKtd, value_BKtd))
        sums = Sums(query_BKGtd)
        for _, tiles, (key, value) in over.pairs(pair):
            sums.add(over.blockwise, tiles, query_BKGtd, key, value)
        out_BKGtd, log_sum_BKGt = sums.done()
        out_BtHd = out_BKGtd.flatten(1, 2).transpose(1, 2).to(query_BHtd.dtype).contiguous()
        ctx.over = over
        ctx.save_for_backward(query_BHtd, key_BKtd, value_BKtd, out_BtHd, log_sum_BKGt)
        return out_BtHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtHd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BHtd, key_BKtd, value_BKtd, out_BtHd, log_sum_BKGt = ctx.saved_tensors
        over: _Attend = ctx.over
        query_BKGtd, grad_BKGtd, out_BKGtd = (
            part.unflatten(1, (key_BKtd.shape[1], -1))
            for part in (query_BHtd, grad_BtHd.transpose(1, 2), out_BtHd.transpose(1, 2))
        )
        gradients = Gradients(query_BKGtd, grad_BKGtd, out_BKGtd, log_sum_BKGt)
        total: Tensor | None = None
        wait: Callable[[], Tensor] | None = None
        for turn, tiles, (key, value) in over.pairs(torch.stack((key_BKtd, value_BKtd))):
            d_pair = gradients.add(over.blockwise, tiles, key, value)
            if total is None:
                total = d_pair
                continue
            if wait is not None:
                total += wait()
            wait = over.exchange(d_pair, send_offset=-turn, recv_offset=turn)
        assert total is not None, "the first turn is over this rank's own keys"
        if wait is not None:
            total += wait()
        d_key_BKtd, d_value_BKtd = total.to(key_BKtd.dtype)
        d_query_BHtd = gradients.d_query_BKGtd.flatten(1, 2).to(query_BHtd.dtype)
        return d_query_BHtd, d_key_BKtd, d_value_BKtd, None
