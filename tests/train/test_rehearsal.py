"""A rehearsed step against a real one on gloo ranks, and against the plan: bytes of a rank, collectives to the byte."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from conftest import PROVE
from counted_step import DOCUMENT_TOKENS
from gloo_steps import SEQ_LEN, config_of, counts, real_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.cli.train.rehearsal import rehearsal_json
from smalti.config.adapter import AdapterConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.layout.collectives import collectives, group
from smalti.cost.memory.per_rank import Assumed, memory_per_rank
from smalti.cost.params import count
from smalti.distributed.group import world as worlds
from smalti.train.rehearsal import PARTS, rehearse


@pytest.fixture(autouse=True)
def _no_world() -> None:
    """End a process group that another test of this process may have left."""
    worlds.leave()


REAL: list[Any] = [
    (2, "moe", {"expert": 2}),
    (4, "moe", {"replicate": 2, "expert": 2}),
    (4, "moe", {"expert": 4, "dispatch": "static"}),
    (4, "moe", {"pipeline": 2, "microbatch_tokens": 64}),
]
if PROVE:
    REAL += [
        (2, "dense", {}),
        (4, "dense", {"replicate": 2, "activation_checkpointing": "full"}),
        (4, "dense", {"sequence": 4, "context": "ring"}),
        (4, "moe", {"sequence": 2, "expert": 2}),
        (4, "moe", {"tensor": 2}),
    ]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "kind", "parallel"), REAL)
def test_a_real_step_matches_its_rehearsal(ranks: int, kind: str, parallel: dict[str, Any]) -> None:
    config = config_of(kind, ranks, **parallel)
    real = real_steps(config)
    stage = ranks // layout_of(config).pipeline
    for rank in range(0, ranks, stage):
        result = rehearse(config, rank=rank, document_tokens=DOCUMENT_TOKENS)
        assert result.peak_bytes == pytest.approx(real[rank].peak_bytes, rel=0.05)
        assert result.bytes_per_rank["parameters"] == result.bytes_per_rank["gradients"] == real[rank].parameters
        assert result.bytes_per_rank["optimizer"] == real[rank].optimizer
        for other in range(rank, rank + stage):
            assert counts(result.collectives) == real[other].collectives, f"rank {other}"


# ---- the plan -------------------------------------------------------------------------------------------------------


def by_group(made: Counter[Any], layout: Layout) -> Counter[Any]:
    """Group by ranks, independent of the name of the axis."""
    result: Counter[Any] = Counter()
    for (op, axis, size), number in made.items():
        result[op, group(layout, axis), size] += number
    return result


def planned(config: RunConfig, layout: Layout) -> Counter[Any]:
    parallel, made = config.train.parallel, Counter[Any]()
    for one in collectives(config, layout, dispatch=parallel.dispatch, context=parallel.context):
        if one.what != "votes, between CPUs":
            made[one.op, one.axis, one.bytes] += one.count
    return by_group(made, layout)


PLANNED: list[Any] = [
    (4, "moe", {"replicate": 2, "expert": 2, "activation_checkpointing": "full"}),
    (8, "moe", {"sequence": 4, "expert": 2}),
    (2, "dense", {"pipeline": 2, "microbatch_tokens": 128}),
]
if PROVE:
    PLANNED += [
        (4, "dense", {"replicate": 4, "microbatch_tokens": 64}),
        (8, "moe", {"expert": 4, "dispatch": "static", "activation_checkpointing": "full"}),
        (4, "dense", {"sequence": 2, "activation_checkpointing": "full"}),
        (4, "dense", {"sequence": 4, "context": "ring"}),
        (4, "dense", {"tensor": 2, "microbatch_tokens": 128}),
        (8, "moe", {"tensor": 2, "expert": 2}),
    ]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "kind", "parallel"), PLANNED)
def test_the_plan_has_the_same_collectives(ranks: int, kind: str, parallel: dict[str, Any]) -> None:
    config = config_of(kind, ranks, **parallel)
    layout = layout_of(config)
    assert by_group(counts(rehearse(config).collectives), layout) == planned(config, layout)


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_sizes_add_up() -> None:
    config = config_of("moe", 8, replicate=2, expert=2)
    result = rehearse(config)
    total = count(config.model).total
    assert result.params == total
    assert result.bytes_per_rank["parameters"] == pytest.approx(4 * total / 4, rel=0.05), "each of four shards"
    assert result.bytes_per_rank["optimizer"] == pytest.approx(8 * total / 4, rel=0.05)
    assert result.checkpoint_bytes == pytest.approx(12 * total / 8, rel=0.05), "two replicas share the work"
    assert sum(result.peak_parts.values()) == result.peak_bytes
    assert not dist.is_initialized(), "nothing is left of it"


@pytest.mark.slow
def test_adapters_are_rehearsed_without_the_weights_of_their_base() -> None:
    config = config_of("dense", 2, rows=2, pipeline=2, microbatch_tokens=64)
    config = config.model_copy(update={"adapter": AdapterConfig(rank=4), "init_from": "nowhere"})
    result, planned = rehearse(config, rank=1), memory_per_rank(config)
    assert result.bytes_per_rank["optimizer"] == pytest.approx(planned.moments_bytes, rel=0.01)
    assert result.bytes_per_rank["parameters"] == pytest.approx(planned.params_bytes, rel=0.01)


def test_a_process_with_a_group_cannot_rehearse() -> None:
    config = config_of("dense", 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="needs its own process group"):
            rehearse(config)
    finally:
        dist.destroy_process_group()


@pytest.mark.exhaustive
@settings(max_examples=20 if PROVE else 3, deadline=None)
@given(microbatches=st.integers(1, 9), replicate=st.sampled_from([1, 2, 500]))
def test_many_microbatches_are_traced_as_few(microbatches: int, replicate: int) -> None:
    rows = 2 * replicate * microbatches
    config = config_of("dense", 2 * replicate, rows, replicate=replicate, microbatch_tokens=SEQ_LEN)
    result, layout = rehearse(config), layout_of(config)
    assert by_group(counts(result.collectives), layout) == planned(config, layout)
    assert set(result.bytes_per_rank) == set(PARTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("compiled", "by_plan"), [("auto", True), (False, False)])
def test_of_compiled_experts_the_larger_peak_must_fit(compiled: Any, by_plan: bool) -> None:
    """They save more than the traced operators; the planner includes it."""
    result = rehearsal_json(config_of("moe", 1, device="cuda", compile=compiled), gpu="h100-sxm")
    peaks = result["peak_bytes_per_rank"], result["planned"]["peak_bytes_per_rank"]
    assert (peaks[1] > 1.05 * peaks[0]) == by_plan
    beside = Assumed()
    assert result["needed_bytes"] == round(peaks[by_plan] * (1 + beside.fragmentation_frac) + beside.context_bytes)
