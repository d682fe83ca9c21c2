"""Attention of shared rows against the dense reference over whole rows: outputs and gradients, both contexts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor

from smalti.config.model import ModelConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import ring_turns
from smalti.distributed.group.mesh import build
from smalti.distributed.parallel.blockwise import Blockwise, Documents
from smalti.distributed.parallel.ring import Ring, chunks
from smalti.distributed.parallel.sequence import own_part
from smalti.distributed.parallel.ulysses import Ulysses
from smalti.model.blocks.attention.scores import ALL_HEADS, scores_of
from smalti.model.blocks.attention.sdpa import dense_rows

ROWS, TOKENS = 2, 48
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "packed": ({}, True),
    "one key head": ({"num_key_value_heads": 1}, True),
    "two key heads": ({"num_key_value_heads": 2}, False),
    "window": ({"sliding_window": 7}, False),
    "window, packed": ({"sliding_window": 11}, True),
    "alibi, packed": ({"position": "alibi", "num_key_value_heads": 2}, True),
    "soft cap": ({"attn_logit_softcapping": 0.5}, False),
    "all": ({"position": "alibi", "attn_logit_softcapping": 0.7, "sliding_window": 20}, True),
}
"""Name -> (options beside four heads, whether rows are packed)."""


_PARTS = ("output", "gradient of the query", "gradient of the key", "gradient of the value")


def _config(**more: Any) -> ModelConfig:
    shape = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return ModelConfig(**(shape | {"family": "decoder", "num_attention_heads": 4} | more))


def _inputs(config: ModelConfig, packed: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Query, key, value [B, T, heads, d]; documents; what the gradient of the output shall be."""
    draw = torch.Generator().manual_seed(3)
    heads, width = config.num_attention_heads, config.width_per_head
    parts = [
        torch.randn(ROWS, TOKENS, n, width, generator=draw) for n in (heads, config.kv_heads, config.kv_heads, heads)
    ]
    begins = torch.rand(ROWS, TOKENS, generator=draw) < 0.1
    return parts[:3], begins.cumsum(dim=1) if packed else None, parts[3]


def _attended(attend: Any, parts_BTHd: list[Tensor], grad_BTHd: Tensor) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = [part.clone().requires_grad_() for part in parts_BTHd]
    out_BTHd = attend(*(leaf.transpose(1, 2) for leaf in leaves))
    out_BTHd.backward(grad_BTHd)
    return [out_BTHd.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _whole(config: ModelConfig, packed: bool, dtype: torch.dtype) -> list[Tensor]:
    parts, documents_BT, grad = _inputs(config, packed)
    like = parts[0].to(dtype).flatten(2)
    attend = dense_rows(like, config.window(0), scores_of(config, like.device), documents_BT)
    return _attended(attend, [part.to(dtype) for part in parts], grad.to(dtype))


def _shared(rank: int, context: Any, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    mesh = build(torch.device("cpu"), Layout(sequence=dist.get_world_size()))
    of_all = (Ulysses if context == "ulysses" else Ring)(mesh.group("sequence"), ALL_HEADS)
    part_of_rank = own_part(mesh, context=context)
    results = {}
    for name, (more, packed) in CASES.items():
        config = _config(**more)
        parts, documents_BT, grad = _inputs(config, packed)
        mine = [part_of_rank(part).to(dtype) for part in parts]
        kernels = of_all(config, mine[0].flatten(2), documents_BT)
        results[name] = _attended(kernels[config.window(0)], mine, part_of_rank(grad).to(dtype))
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(2, torch.float32, id="2-fp32", marks=pytest.mark.slow),
        pytest.param(4, torch.float32, id="4-fp32"),
        pytest.param(2, torch.bfloat16, id="2-bf16", marks=pytest.mark.slow),
        pytest.param(4, torch.bfloat16, id="4-bf16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_shared_rows_attend_as_whole_ones(ranks: int, context: str, dtype: torch.dtype) -> None:
    by_rank = run_ranks(ranks, _shared, context, dtype)
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (0.05, 0.05)
    for name, (more, packed) in CASES.items():
        wanted = _whole(_config(**more), packed, dtype)
        for number, whole in enumerate(wanted):
            part = _put_together([shared[name][number] for shared in by_rank], context)
            torch.testing.assert_close(part, whole, rtol=rtol, atol=atol, msg=f"{name}, {_PARTS[number]}")


def _put_together(parts_BtHd: list[Tensor], context: str) -> Tensor:
    if context == "ulysses":
        return torch.cat(parts_BtHd, dim=1)
    halves = [part.chunk(2, dim=1) for part in parts_BtHd]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=1)


@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_every_pair_that_is_seen_is_in_one_tile(window: int | None, packed: bool) -> None:
    """Counted token by token; and what is left out is what nothing sees."""
    ranks, per_rank = 4, TOKENS // 4
    config = _config()
    _, documents_BT, _ = _inputs(config, packed)
    device = torch.device("cpu")
    how = Blockwise(
        scores_of(config, device), window, None if documents_BT is None else Documents(documents_BT), device
    )
    how.tile = (5, 4)
    at = torch.arange(TOKENS)
    seen_TT = (at[:, None] >= at) & (at[:, None] - at < (window or TOKENS))
    if documents_BT is not None:
        seen_TT = seen_TT & (documents_BT[:, :, None] == documents_BT[:, None, :]).any(dim=0)
    covered_TT = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
    for place in range(ranks):
        for turn in [0, *ring_turns(TOKENS, ranks, window)]:
            for tile in how.tiles(chunks(place, ranks, per_rank), chunks((place - turn) % ranks, ranks, per_rank)):
                rows = slice(tile.first_query, tile.first_query + tile.queries.stop - tile.queries.start)
                columns = slice(tile.first_key, tile.first_key + tile.keys.stop - tile.keys.start)
                covered_TT[rows, columns] += 1
                assert seen_TT[rows, columns].any() or packed
                assert tile.masked or bool(seen_TT[rows, columns].all())
    assert int(covered_TT.max()) == 1
    assert bool((covered_TT[seen_TT] == 1).all())


def test_turns_in_which_a_window_shows_nothing_are_left_out() -> None:
    assert ring_turns(64, 4, None) == [1, 2, 3]
    assert ring_turns(64, 4, 8) == [1, 3]
    assert ring_turns(64, 4, 1) == []
    assert ring_turns(64, 1, None) == []
