"""Collectives of axes that no run has yet, against published formulas and one traced step."""

from collections import defaultdict

import pytest
from test_scaling import run_of

from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Collective, collectives, cut


def long_rows(model: str, seq_len: int, rows: int, full: str = "none") -> RunConfig:
    values = {
        "name": model,
        "model": {"preset": model, "max_position_embeddings": seq_len},
        "data": {"sources": {"a": "a"}, "seq_len": seq_len, "stages": [{"weights": {"a": 1}}]},
        "train": {
            "duration": "10step",
            "global_batch_tokens": rows * seq_len,
            "optimizer": {"lr": 1e-4},
            "parallel": {"device": "cuda", "activation_checkpointing": full},
        },
    }
    return from_dict(RunConfig, values).config


def on(axis: str, made: list[Collective]) -> list[Collective]:
    return [one for one in made if one.axis == axis]


def test_experts_as_traced_on_a_fake_process_group() -> None:
    """DBRX on 24 x (16 x 8) ranks, a row of 2,048 tokens each: a step traced with torch 2.13 had 161 gathers of 80.1
    GB, 81 reduce-scatters of 82.6 GB, 81 all-reduces of 4.1 GB and 160 all-to-alls of 16.1 GB. There the root kept
    its weights (one gather less), routers were part of their blocks, and counts were fixed."""
    config = run_of("dbrx-132b", 3072 * 2048, full=False)
    made = collectives(config, Layout(replicate=24, shard=128, expert=8), 2048)
    calls, nbytes = defaultdict[str, int](int), defaultdict[str, int](int)
    for one in made:
        if one.axis == "world" or one.what.startswith("router") or one.what == "counts of tokens":
            continue
        if one.what == "root: weights" and one.when == "backward":
            continue
        calls[one.op] += one.count
        nbytes[one.op] += one.total_bytes
    assert calls == {"all_gather": 161, "reduce_scatter": 81, "all_reduce": 81, "all_to_all": 160}
    traced = {"all_gather": 80.1, "reduce_scatter": 82.6, "all_reduce": 4.1, "all_to_all": 16.1}
    for op, gigabytes in traced.items():
        assert nbytes[op] / 1e9 == pytest.approx(gigabytes, rel=0.005), op


def test_static_dispatch_holds_the_worst_case() -> None:
    """16 experts on 8 ranks, four a token: at most two of them on one rank, 8 x 2 slots in place of 4."""
    config = run_of("dbrx-132b", 3072 * 2048, full=False)
    layout = Layout(replicate=24, shard=128, expert=8)
    exact, static = (
        sum(one.total_bytes for one in on("expert", collectives(config, layout, 2048, dispatch=how)) if one.bytes > 128)
        for how in ("exact", "static")
    )
    assert static == 4 * exact
    counts = [
        [one for one in collectives(config, layout, 2048, dispatch=how) if one.what == "counts of tokens"]
        for how in ("exact", "static")
    ]
    assert counts[0] == counts[1] != []


@pytest.mark.parametrize("full", [False, True])
def test_tensor_moves_what_korthikanti_et_al_say(full: bool) -> None:
    """Section 4.2.2: a block's all-gathers and reduce-scatters move as much as the four all-reduces of Megatron's first
    tensor parallelism, two forward and two backward; recomputation repeats the forward ones, but for the reduce-scatter
    that a block ends with."""
    config = run_of("mpt-7b", 2**18, full=full)
    made = on("tensor", collectives(config, Layout(shard=8, tensor=8), 4 * 2048))
    blocks = [one for one in made if one.what == "block: activations"]
    row = 4 * 2048 * 4096 * 2
    assert {one.bytes for one in blocks} == {row}
    microbatches = 2**18 // 2048 // 8 // 4
    calls = (11 if full else 8) * 32 * microbatches
    assert sum(one.count for one in blocks) == calls, "an all-reduce is a reduce-scatter and a gather"
    assert not any(one.overlaps for one in blocks)


def test_ulysses_volume_falls_with_ranks_and_ring_does_not() -> None:
    """Jacobs et al. 2023, section 3.2: with all heads alike a rank sends 4 N h / P elements a block forward."""
    config, hidden, seq_len = long_rows("mpt-7b", 65_536, 8), 4096, 65_536
    for ranks in (2, 4, 8):
        made = on("sequence", collectives(config, Layout(shard=1, sequence=ranks), seq_len))
        forward = sum(one.bytes for one in made if one.when == "forward")
        assert forward == 4 * seq_len * hidden * 2 / ranks
        ring = on("sequence", collectives(config, Layout(shard=1, sequence=ranks), seq_len, context="ring"))
        sent = sum(one.total_bytes for one in ring if one.when == "forward") / 32 / 8
        assert sent == 2 * seq_len * hidden * 2 * (ranks - 1) / ranks, "keys and values of the other ranks"


def test_few_key_value_heads_are_repeated_for_ulysses() -> None:
    """Llama-3-8B has 8 of them: on 16 ranks each travels to two."""
    config = long_rows("llama-3-8b", 131_072, 16)
    made = on("sequence", collectives(config, Layout(shard=1, sequence=16), 131_072))
    into = next(one for one in made if one.what == "query, key, value")
    assert into.bytes == 131_072 // 16 * 128 * (32 + 2 * 16) * 2


def test_pipeline_sends_each_microbatch_both_ways() -> None:
    config = run_of("mpt-7b", 2**18)
    layout = Layout(shard=4, pipeline=4)
    made = collectives(config, layout, 2048)
    sends = on("pipeline", made)
    assert [(one.op, one.count, one.bytes) for one in sends] == [("send_recv", 32, 2048 * 4096 * 2)] * 2
    gathers = [one for one in made if one.op == "all_gather" and one.what == "block: weights"]
    assert [(one.count, one.when) for one in gathers] == [(8, "forward")], "once a step, of a quarter of the blocks"


def test_a_ragged_last_microbatch_is_an_average() -> None:
    """5 rows in microbatches of 2: three passes, 5/3 rows each."""
    config = run_of("mpt-7b", 5 * 2048)
    whole = cut(config, Layout(), 2 * 2048)
    assert (whole.rows, whole.microbatches, whole.tokens) == (2, 3, -(-5 * 2048 // 3))
