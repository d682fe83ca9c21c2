"""What ``auto`` axes become, and what is refused: a hint can always be followed, and what passes can be laid."""

import re
from typing import Any

import pytest
from example_config import example_config
from hypothesis import given
from hypothesis import strategies as st
from test_scaling import DBRX, H100, run_of

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import AXES, Layout, layout_of
from smalti.cost.layout.auto import resolve
from smalti.cost.layout.possible import check, nearest, possible_layout, reasons
from smalti.cost.memory.per_rank import memory_per_rank


def with_axes(config: RunConfig, **parallel: Any) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["train"]["parallel"] |= parallel
    return from_dict(RunConfig, tree).config


# ---- refused, with the nearest that can be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "says", "hint"),
    [
        ({"ranks": 6, "tensor": 3}, "tensor=3 is not possible: 4 query heads are not a multiple", "tensor=2"),
        ({"ranks": 4, "pipeline": 4}, "pipeline=4 is not possible: 3 layers are fewer than its 4", "pipeline=2"),
        ({"ranks": 4, "expert": 2}, "expert=2 is not possible: the model has no experts", "expert=1"),
        ({"ranks": 8, "sequence": 8}, "sequence=8 is not possible: 4 query heads on a rank are not", "sequence=4"),
        ({"ranks": 4, "replicate": 3}, "replicate=3 does not divide the 4 ranks", "replicate=4"),
        ({"ranks": 4, "tensor": 3}, "tensor=3 does not divide the 4 ranks", "tensor=4"),
    ],
)
def test_refused_with_the_value_the_reason_and_the_nearest(parallel: dict[str, Any], says: str, hint: str) -> None:
    config = with_axes(example_config(), **parallel)
    with pytest.raises(UserError) as refused:
        possible_layout(config)
    assert says in refused.value.message
    assert refused.value.hint == f"train.parallel.{hint}"


def test_a_ring_takes_any_heads() -> None:
    assert possible_layout(with_axes(example_config(), ranks=8, sequence=8, context="ring")) == Layout(sequence=8)


@pytest.mark.parametrize(
    ("option", "axis"), [("dispatch=static", "expert"), ("context=ring", "sequence"), ("pipeline_schedule=1f1b", "")]
)
def test_options_without_effect_are_errors(option: str, axis: str) -> None:
    if not axis:  # the default says nothing
        assert example_config(f"train.parallel.{option}").train.parallel.pipeline_schedule == "1f1b"
        return
    with pytest.raises(UserError, match=f"no effect with train.parallel.{axis}=1"):
        example_config(f"train.parallel.{option}")
    example_config(f"train.parallel.{option}", f"train.parallel.{axis}=auto")


sizes = st.one_of(st.just("auto"), st.integers(1, 9))


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    model: dict[str, Any] = {
        "family": "decoder", "vocab_size": 64, "hidden_size": heads * 4, "num_hidden_layers": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.sampled_from([24, 36, 48, 64])), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        model["moe"] = {"num_experts": draw(st.sampled_from([2, 4, 6, 8, 12])), "num_experts_per_tok": 2}
    axes = {axis: draw(sizes) for axis in AXES}
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64]))
    parallel: dict[str, Any] = {"ranks": ranks, **axes}
    for option, axis, other in (
        ("context", "sequence", "ring"), ("pipeline_schedule", "pipeline", "interleaved"),
    ):  # fmt: skip
        if axes[axis] != 1 and draw(st.booleans()):
            parallel[option] = other
    if axes["expert"] != 1 and draw(st.booleans()):
        parallel["dispatch"] = "static"
    seq_len = draw(st.sampled_from([16, 24, 32, 48]))
    train = {
        "duration": "4step",
        "global_batch_tokens": seq_len * draw(st.integers(1, 48)),
        "optimizer": {"lr": 1e-3},
        "parallel": parallel,
    }
    data = {"sources": {"a": "a"}, "seq_len": seq_len, "stages": [{"weights": {"a": 1}}]}
    return from_dict(RunConfig, {"name": "random", "model": model, "data": data, "train": train}).config


@given(configs())
def test_what_is_hinted_is_accepted_and_what_is_accepted_can_be_laid(config: RunConfig) -> None:
    try:
        layout = possible_layout(config)
    except UserError as refused:
        hint = str(refused.hint)
        changed = dict(word.removeprefix("train.parallel.").split("=") for word in hint.split())
        config = with_axes(
            config, **{name: int(value) if value.isdigit() else value for name, value in changed.items()}
        )
        layout = possible_layout(config)
        assert layout == nearest(config, config.train.parallel.ranks)
    # by hand, as distributed/ applies them
    rows = config.train.global_batch_tokens // config.data.seq_len
    model, ring = config.model, config.train.parallel.context == "ring"
    assert layout.world_size == config.train.parallel.ranks
    assert model.num_attention_heads % layout.tensor == model.kv_heads % layout.tensor == 0
    heads, kv_heads = model.num_attention_heads // layout.tensor, model.kv_heads // layout.tensor
    if layout.sequence > 1 and not ring:
        assert heads % layout.sequence == 0
        assert kv_heads % layout.sequence == 0 or layout.sequence % kv_heads == 0
    tokens, left = divmod(config.data.seq_len, layout.sequence * (2 if ring and layout.sequence > 1 else 1))
    assert left == 0
    assert tokens * (2 if ring and layout.sequence > 1 else 1) % layout.tensor == 0
    stages = layout.pipeline * (2 if layout.pipeline > 1 and config.train.parallel.pipeline_schedule != "1f1b" else 1)
    assert model.num_hidden_layers >= stages
    assert -(-rows // layout.data_ranks) >= layout.pipeline
    assert model.intermediate_size % layout.tensor == model.vocab_size % layout.tensor == 0
    if layout.expert > 1:
        assert model.moe is not None
        assert model.moe.num_experts % layout.expert == 0
        assert layout.weight_shards % layout.expert == 0
        assert model.expert_width % (layout.weight_shards // layout.expert * layout.tensor) == 0


@given(configs())
def test_no_nearer_layout_was_passed_over(config: RunConfig) -> None:
    """Every axis alone, to any size: where that makes a layout, the hint changes one axis too."""
    try:
        possible_layout(config)
    except UserError as refused:
        ranks = config.train.parallel.ranks
        words = [word for word in str(refused.hint).split() if re.search(r"=\d+$", word)]  # axes, no options
        for axis in AXES:
            for size in range(1, 13):
                if getattr(config.train.parallel, axis) == "auto" or size == getattr(config.train.parallel, axis):
                    continue
                parallel = config.train.parallel.model_copy(update={axis: size})
                changed = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
                try:
                    fits = not reasons(changed, layout_of(changed, ranks))
                except UserError:
                    continue
                assert not fits or len(words) == 1, f"{axis}={size} alone would do"


# ---- auto ------------------------------------------------------------------------------------------------------------


def test_on_a_cpu_shard_is_all_that_is_left() -> None:
    config = with_axes(example_config(), ranks=8, **dict.fromkeys(AXES, "auto"))
    assert (resolve(config).layout, resolve(config).by) == (Layout(shard=8), "rule")
    assert resolve(with_axes(config, tensor=2)).layout == Layout(shard=4, tensor=2)
    numbers = with_axes(config, replicate=2, shard=4, tensor=1, expert=1, sequence=1, pipeline=1)
    assert (resolve(numbers).layout, resolve(numbers).by) == (Layout(2, 4), "config")


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_on_a_known_device_the_planner_chooses_what_fits(ranks: int) -> None:
    config = run_of("mpt-7b", 2**22) if ranks == 8 else DBRX
    config = with_axes(config, ranks=ranks, **dict.fromkeys(AXES, "auto"))
    found = resolve(config, hardware=H100)
    assert found.by == "planner"
    assert found.layout.world_size == ranks
    check(config, found.layout)
    need = memory_per_rank(config, layout=found.layout, microbatch_tokens=config.data.seq_len, device="cuda")
    assert need.total_bytes <= H100.available_memory_bytes
    assert config.train.parallel.tensor == "auto", "it stays in the config"


def test_the_planner_keeps_axes_with_a_number() -> None:
    config = with_axes(DBRX, ranks=64, replicate="auto", expert=4, tensor="auto", pipeline=1, sequence=1)
    layout = resolve(config, hardware=H100).layout
    assert (layout.expert, layout.pipeline, layout.sequence) == (4, 1, 1)
    sharded = with_axes(DBRX, ranks=64, replicate=1, shard=64, expert="auto")
    layout = resolve(sharded, hardware=H100).layout
    assert (layout.replicate, layout.shard) == (1, 64)
    with pytest.raises(UserError, match="fits no layout") as refused:
        resolve(with_axes(DBRX, ranks=64, replicate=2, shard=32, expert="auto"), hardware=H100)
    assert "train.parallel.shard=auto" in str(refused.value.hint)


def test_nodes_are_those_of_the_launcher() -> None:
    config = with_axes(run_of("mpt-7b", 12 * 2**14), ranks=12, tensor="auto", replicate="auto")
    with pytest.raises(UserError, match="not whole nodes"):
        resolve(config, hardware=H100)
    assert resolve(config, hardware=H100, node_ranks=6).layout.world_size == 12


def test_what_fits_nowhere_says_how_many_ranks_would_do() -> None:
    with pytest.raises(UserError, match="fits no layout of 8 x") as refused:
        resolve(with_axes(DBRX, ranks=8, tensor="auto", expert="auto"), hardware=H100)
    assert "train.parallel.ranks=" in str(refused.value.hint)
    with pytest.raises(UserError, match="does not divide the 8 ranks"):
        resolve(with_axes(DBRX, ranks=8, tensor=3, expert="auto"), hardware=H100)


def test_without_a_known_network_the_simple_rule_holds() -> None:
    alone = H100.model_copy(update={"network_bytes_per_s": None})
    config = with_axes(run_of("mpt-125m", 2**18), ranks=16, tensor="auto")
    assert resolve(config, hardware=alone).by == "rule"
    assert resolve(config, hardware=alone, node_ranks=16).by == "planner"
