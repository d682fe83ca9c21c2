"""Memory: shards add up, activations grow as they must, and a real step holds what is predicted."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from example_config import example_config
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_activations import saved_activation_bytes

from smalti.base.errors import UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.batch import usual_microbatch
from smalti.cost.layout.oom_hints import oom_hints
from smalti.cost.layout.possible import possible_layout
from smalti.cost.memory.activations import BlockTape
from smalti.cost.memory.fit import largest_microbatch, memory_fixes
from smalti.cost.memory.per_rank import Assumed, memory_per_rank
from smalti.cost.memory.snapshots import Parts, Rank, step_snapshots
from smalti.cost.memory.tape import MicrobatchShape, Tape
from smalti.cost.params import count

LLAMA_3_8B: dict[str, Any] = {
    "name": "llama",
    "model": {"preset": "llama-3-8b"},
    "data": {"sources": {"a": "x"}, "seq_len": 8192, "stages": [{"weights": {"a": 1}}], "mask_documents": False},
    "train": {
        "duration": "10step", "global_batch_tokens": 2**22, "microbatch_tokens": 8192, "optimizer": {"lr": 1e-4},
        "parallel": {"ranks": 8, "device": "cuda"},
    },
}  # fmt: skip


# ---- whole sizes ----------------------------------------------------------------------------------------------------


def test_weights_gradients_moments_by_hand() -> None:
    total = count(example_config().model).total
    one = memory_per_rank(example_config())
    assert (one.params_bytes, one.grads_bytes, one.moments_bytes) == (4 * total, 4 * total, 8 * total)
    four = memory_per_rank(example_config("train.parallel.ranks=4"))
    assert four.params_bytes == pytest.approx(total, rel=1e-3)


def test_lion_has_one_moment() -> None:
    adamw, lion = memory_per_rank(example_config()), memory_per_rank(example_config("train.optimizer.name=lion"))
    assert adamw.moments_bytes == 2 * lion.moments_bytes
    assert lion.phases["optimizer"] == adamw.phases["optimizer"], "its updates take what a moment would"


def test_logits_take_what_the_loss_is_given() -> None:
    row = 8192 * 128 * 2
    assert memory_per_rank(example_config("train.loss.chunk_bytes=20000000")).logits_bytes <= 20_000_000 + 2 * row
    config, one_tile = example_config(), memory_per_rank(example_config("train.loss.chunk_bytes=1e15")).logits_bytes
    assert one_tile == usual_microbatch(config, 1) * config.model.vocab_size * 10, "bf16 and fp32 logits, probabilities"


def test_replicas_do_not_shard() -> None:
    sharded = memory_per_rank(example_config("train.parallel.ranks=4"))
    replicated = memory_per_rank(example_config("train.parallel.ranks=4", "train.parallel.replicate=2"))
    assert replicated.params_bytes == pytest.approx(2 * sharded.params_bytes, rel=1e-3)


def test_the_sum_is_the_sum() -> None:
    found = memory_per_rank(example_config("train.parallel.device=cuda", "train.parallel.ranks=2"))
    values = found.to_json()
    assert values["tensors_bytes"] == pytest.approx(sum(values["peak_bytes"].values()), abs=9)
    assert values["phase_bytes"][values["peak_phase"]] == max(values["phase_bytes"].values()) == found.tensors_bytes
    beside = Assumed().context_bytes + Assumed().communicator_bytes + Assumed().fragmentation_frac * found.tensors_bytes
    assert values["total_bytes"] == pytest.approx(found.tensors_bytes + beside, abs=2)
    on_cpu = memory_per_rank(example_config())
    assert on_cpu.staging_bytes == on_cpu.params_bytes + on_cpu.moments_bytes
    assert on_cpu.total_bytes == on_cpu.tensors_bytes + on_cpu.staging_bytes
    replicas = memory_per_rank(example_config("train.parallel.ranks=2", "train.parallel.replicate=2"))
    assert replicas.staging_bytes == on_cpu.staging_bytes / 2, "each writes a half"
    adapter = memory_per_rank(example_config("init_from=base", "adapter.rank=4"))
    assert adapter.staging_bytes == 3 * adapter.moments_bytes / 2, "the base is not saved"


# ---- microbatches ---------------------------------------------------------------------------------------------------


def test_microbatch() -> None:
    assert usual_microbatch(example_config(), 1) == 8192
    assert usual_microbatch(example_config(), 3) == 11 * 256, "32 sequences over 3 ranks"
    assert usual_microbatch(example_config("train.global_batch_tokens=262144"), 1) == 16_384
    assert usual_microbatch(example_config("train.microbatch_tokens=512"), 1) == 512


@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from([64, 1000, 16_384, 20_000]))
def test_auto_microbatch_is_what_it_says(sequences: int, ranks: int, seq_len: int) -> None:
    """The largest number of whole sequences in the rank's share and in 16,384 tokens, at least one."""
    found = usual_microbatch(
        example_config(
            f"data.seq_len={seq_len}",
            "model.max_position_embeddings=20000",
            f"train.global_batch_tokens={sequences * seq_len}",
        ),
        ranks,
    )
    share = math.ceil(sequences / ranks)
    fitting = [n for n in range(1, share + 1) if n * seq_len <= 16_384]
    assert found == seq_len * max(fitting, default=1)


def test_gradients_of_the_first_microbatch_are_there_in_the_second() -> None:
    one = memory_per_rank(example_config("train.global_batch_tokens=4096", "train.microbatch_tokens=4096"))
    two = memory_per_rank(example_config("train.global_batch_tokens=8192", "train.microbatch_tokens=4096"))
    more = two.phases["forward"] - one.phases["forward"]
    assert more == pytest.approx(one.grads_bytes, rel=0.05), "and 4,096 tokens more of the batch"


# ---- activations ----------------------------------------------------------------------------------------------------


def test_activations_are_linear_in_tokens_and_layers() -> None:
    model = example_config().model
    deeper = example_config("model.num_hidden_layers=6").model
    base = saved_activation_bytes(model, MicrobatchShape(1, 100, 2, "cuda"), recompute=False)
    assert saved_activation_bytes(model, MicrobatchShape(1, 300, 2, "cuda"), recompute=False) == 3 * base
    assert saved_activation_bytes(deeper, MicrobatchShape(1, 100, 2, "cuda"), recompute=False) == 2 * base


def test_a_pipeline_stage_keeps_its_weights_gathered() -> None:
    """As ``cost/layout/collectives.py`` counts them: gathered once a step."""
    config = from_dict(RunConfig, LLAMA_3_8B).config
    found = memory_per_rank(config, layout=Layout(shard=2, pipeline=4))
    blocks = 8_030_261_248 - 2 * 128_256 * 4096  # without embedding and head
    assert found.gathered_bytes >= 2 * blocks / 4


def test_recomputation_saves_with_depth() -> None:
    deep = example_config("model.num_hidden_layers=32").model
    whole = saved_activation_bytes(deep, MicrobatchShape(1, 100, 2, "cuda"), recompute=False)
    assert saved_activation_bytes(deep, MicrobatchShape(1, 100, 2, "cuda"), recompute=True) < whole / 8


def test_a_block_of_llama_by_hand() -> None:
    """The worked example of docs/concepts/plan/memory.md."""
    model = from_dict(ModelConfig, {"preset": "llama-3-8b"}).config
    rows = 6 * 2 * 4096  # input, normed, query, attention's output, residual, normed
    token = rows + 2 * 2 * 1024 + 4 * 32 + 4 * 2 * 14336
    assert token == 168_064
    assert (
        saved_activation_bytes(model, MicrobatchShape(1, 8192, 2, "cuda"), recompute=False)
        == 32 * 8192 * token
        == 44_056_969_216
    )
    found = memory_per_rank(from_dict(RunConfig, LLAMA_3_8B).config)
    assert found.activations_bytes == pytest.approx(44.06e9, rel=0.01)
    assert found.params_bytes + found.grads_bytes + found.moments_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert (found.peak.phase, found.tensors_bytes) == ("loss", pytest.approx(68.28e9, rel=1e-3))
    assert found.total_bytes == pytest.approx(80.88e9, rel=1e-3)
    assert largest_microbatch(from_dict(RunConfig, LLAMA_3_8B).config, 85.5e9, device="cuda") == 8192


def test_what_the_trainer_calls_the_same() -> None:
    pytest.importorskip("torch")
    from smalti.cost.memory import attention as activations
    from smalti.model.blocks.attention import choice, spans

    assert choice.LONGEST_KEPT_TOKENS == activations.LONGEST_KEPT_TOKENS
    assert choice._LONGEST_MASKED_TOKENS == activations.LONGEST_MASKED_TOKENS
    assert spans.BLOCK_TOKENS == activations.BLOCK_TOKENS


@given(
    st.sampled_from(["rmsnorm", "layernorm"]), st.sampled_from(["pre", "post"]), st.booleans(),
    st.sampled_from([None, "head", "full"]), st.sampled_from([None, 8.0]), st.sampled_from(["rope", "alibi"]),
    st.sampled_from([None, 20.0]), st.sampled_from([None, 16]), st.booleans(), st.sampled_from([2, 4]),
    st.sampled_from(["cpu", "cuda"]), st.booleans(), st.sampled_from([64, 512, 2048]),
)  # fmt: skip
def test_a_block_gives_back_all_that_it_takes(
    norm: str, place: str, gated: bool, qk_norm: str | None, clip: float | None, position: str, cap: float | None,
    window: int | None, moe: bool, size: int, device: Any, documents: bool, seq_len: int,
) -> None:  # fmt: skip
    """Whatever its options: after both passes nothing is left but the gradients of its weights, once each."""
    model = ModelConfig(
        family="decoder", vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, norm=norm, norm_placement=place, gated=gated, qk_norm=qk_norm,
        clip_qkv=clip, position=position, attn_logit_softcapping=cap, sliding_window=window,
        moe={"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1} if moe else None,
    )  # fmt: skip
    for keeps in (True, False):
        tape, block = Tape(keeps=keeps), BlockTape(model, 0, MicrobatchShape(2, seq_len, size, device, documents))
        block.forward(tape)
        if not keeps:
            assert not tape.alive
            continue
        assert set(tape.alive) == tape.saved
        tape.begin()
        tape.new("g", block.row)
        block.backward(tape)
        left = {name for name in tape.alive if name != "g"}
        assert all(name.startswith("w.") for name in left), sorted(left)
        params = count(model)
        weights = sum(tape.alive[name] for name in left) / size
        assert weights == pytest.approx(params.attention + params.mlp, rel=1e-6)


@given(st.integers(1, 4), st.sampled_from([64, 256]), st.sampled_from(["none", "full"]), st.sampled_from([1, 2, 4]))
def test_every_moment_is_made_of_what_there_is(rows: int, seq_len: int, recompute: str, shards: int) -> None:
    model = example_config().model
    found = step_snapshots(
        model, MicrobatchShape(rows, seq_len, 2, "cpu"), Rank(shards=shards, recompute=recompute == "full")
    )
    assert {moment.phase for moment in found} == {"forward", "loss", "backward", "reduce", "optimizer"}
    for moment in found:
        assert all(size >= 0 for size in asdict(moment.parts).values()), moment
        assert moment.parts.weights == found[0].parts.weights
    last = found[-1].parts
    assert last.activations == last.gathered == last.logits == 0
    assert last.gradients == last.weights


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "weights", "activations"),
    [
        ({"shard": 8}, 8, 1),
        ({"shard": 4, "sequence": 2}, 8, 2),
        ({"shard": 1, "tensor": 8}, 8, 8),
        ({"shard": 2, "tensor": 4, "replicate": 4}, 8, 4),
    ],
)
def test_axes_divide_what_they_divide(axes: dict[str, int], weights: int, activations: int) -> None:
    config = from_dict(RunConfig, LLAMA_3_8B).config
    one = memory_per_rank(config, layout=Layout(), device="cuda")
    split = memory_per_rank(config, layout=Layout(**axes), device="cuda")
    assert one.params_bytes / split.params_bytes == pytest.approx(weights, rel=0.01)
    assert one.activations_bytes / split.activations_bytes == pytest.approx(activations, rel=0.02)


def test_a_pipeline_holds_microbatches_in_flight() -> None:
    config = from_dict(RunConfig, LLAMA_3_8B).config
    one = memory_per_rank(config, layout=Layout(shard=8), device="cuda")
    four = memory_per_rank(config, layout=Layout(shard=8, pipeline=4), device="cuda")
    assert four.activations_bytes == pytest.approx(one.activations_bytes, rel=0.02), (
        "a quarter of the layers, four times"
    )
    assert four.params_bytes < one.params_bytes / 3, (
        "its first or last stage: a quarter of the blocks, one of two tables"
    )


def test_a_pipeline_stage_holds_whole_gradients_until_the_last_microbatch() -> None:
    """fp32 by default; from the second microbatch on all of them are there, and then one share after another."""
    values = {**LLAMA_3_8B, "train": {**LLAMA_3_8B["train"], "global_batch_tokens": 2**20}}
    config = from_dict(RunConfig, values).config
    one, many = Layout(shard=128, pipeline=4), Layout(shard=8, pipeline=4)
    whole = 8 * 218_112_000 + 128_256 * 4096 + 4096  # blocks, output matrix and last norm of the last stage
    phases = [memory_per_rank(config, layout=layout, device="cuda").phases for layout in (one, many)]
    shape = MicrobatchShape(1, 8192, 2, "cuda")
    for batches in (1, 16):
        rank = Rank(shards=8, microbatches=batches, layers=range(24, 32), in_flight=1)
        found = step_snapshots(config.model, shape, rank)
        waiting = [moment.parts.gradients for moment in found if moment.phase == "forward"]
        assert set(waiting) == ({0.0} if batches == 1 else {4.0 * whole})
        reduced = [moment.parts for moment in found if moment.phase == "reduce"]
        assert reduced[0].gradients == 4 * whole, "nothing is reduced before the end"
        assert max(parts.activations for parts in reduced) == 0
        assert reduced[-1].gradients == pytest.approx(4 * whole / 8), "all shares, and no whole gradient"
    assert phases[1]["forward"] > 4 * whole


def test_an_expert_axis_gathers_fewer_experts() -> None:
    values = {**LLAMA_3_8B, "model": {"preset": "dbrx-5b"}}
    values["data"] = {**LLAMA_3_8B["data"], "seq_len": 2048}
    config = from_dict(RunConfig, values).config
    flat, spread = (memory_per_rank(config, layout=Layout(shard=16, expert=n), device="cuda") for n in (1, 8))
    assert flat.params_bytes == spread.params_bytes
    assert spread.gathered_bytes < flat.gathered_bytes


@given(
    windows=st.lists(st.booleans(), min_size=1, max_size=12), dense=st.integers(0, 3), recompute=st.booleans(),
    stage=st.booleans(), batches=st.integers(1, 2), shards=st.sampled_from([1, 8]), reduce=st.sampled_from([2, 4]),
)  # fmt: skip
@settings(max_examples=30)
def test_layers_that_are_not_told_are_not_fuller(
    windows: list[bool], dense: int, recompute: bool, stage: bool, batches: int, shards: int, reduce: int
) -> None:
    """Of each phase, and of each part of it."""
    layers = len(windows)
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": list(range(min(dense, layers - 1)))}
    model = example_config(f"model.num_hidden_layers={layers}", "model.family=decoder").model.model_dump()
    types = ["sliding_attention" if one else "full_attention" for one in windows]
    more = {"moe": moe, "layer_types": types, "sliding_window": 64}
    config = ModelConfig.model_validate({**model, **more})
    rank = Rank(
        shards=shards, reduce_bytes=reduce, recompute=recompute, microbatches=batches,
        layers=range(layers // 2, layers) if stage else None,
    )  # fmt: skip
    shape = MicrobatchShape(2, 256, 2, "cpu")
    few, all_of = step_snapshots(config, shape, rank), step_snapshots(config, shape, rank, every_layer=True)
    assert len(few) <= len(all_of)
    for phase in {moment.phase for moment in all_of}:
        for name in (*asdict(Parts()), "total"):
            both = [[getattr(one.parts, name) for one in told if one.phase == phase] for told in (few, all_of)]
            assert max(both[0]) == max(both[1]), (phase, name)


# ---- what fits ------------------------------------------------------------------------------------------------------


@given(st.integers(30, 45))
def test_largest_microbatch_is_the_largest(log_bytes: int) -> None:
    config, memory_bytes = from_dict(RunConfig, LLAMA_3_8B).config, 2.0**log_bytes
    found = largest_microbatch(config, memory_bytes, device="cuda")
    rows = 0 if found is None else found // 8192

    def needs(n: int) -> int:
        return memory_per_rank(config, microbatch_tokens=n * 8192, device="cuda").total_bytes

    assert rows == 0 or needs(rows) <= memory_bytes
    assert rows == 2**22 // 8192 // 8 or needs(rows + 1) > memory_bytes


def test_what_helps_helps() -> None:
    config = from_dict(RunConfig, LLAMA_3_8B).config
    assert memory_fixes(config, 200e9, device="cuda") == []
    found = memory_fixes(config, 40e9, device="cuda")
    assert [one.change for one in found][:1] == ["train.parallel.activation_checkpointing=full"]
    for one in found:
        changed = from_dict(RunConfig, config.model_dump(mode="json"), overrides=one.change.split()).config
        assert memory_per_rank(changed, device="cuda").total_bytes == one.total_bytes <= 40e9
    assert memory_fixes(config, 1e9, device="cuda") == [], "nothing is enough"


def test_what_helps_is_of_the_layout_that_is_given() -> None:
    """Matrices cut over 8 ranks; the config alone, with its axes still auto, would shard over them."""
    config = from_dict(RunConfig, LLAMA_3_8B, overrides=["train.parallel.ranks=8", "train.parallel.tensor=auto"]).config
    layout = Layout(tensor=8)
    now = memory_per_rank(config, layout=layout, device="cuda").total_bytes
    assert now != memory_per_rank(config, device="cuda").total_bytes
    assert memory_fixes(config, now, layout, device="cuda") == []
    for one in memory_fixes(config, 0.9 * now, layout, device="cuda"):
        changed = from_dict(RunConfig, config.model_dump(mode="json"), overrides=one.change.split()).config
        grown = Layout(tensor=8, shard=changed.train.parallel.ranks // 8)
        assert memory_per_rank(changed, layout=grown, device="cuda").total_bytes == one.total_bytes <= 0.9 * now


LAYOUTS = [Layout(), Layout(shard=8), Layout(tensor=4, shard=2), Layout(pipeline=4), Layout(sequence=8)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_after_running_out_only_what_lowers_is_named(layout: Layout, device: str) -> None:
    axes = [f"train.parallel.{axis}={size}" for axis, size in asdict(layout).items()]
    config = from_dict(RunConfig, LLAMA_3_8B, overrides=[f"train.parallel.ranks={layout.world_size}", *axes]).config
    seq_len = max(config.data.seq_lens)
    now = memory_per_rank(config, layout=layout, microbatch_tokens=seq_len, device=device).total_bytes
    found = oom_hints(config, layout, seq_len, device=device)
    assert "train.parallel.activation_checkpointing=full" in found
    assert any("ranks=" in one for one in found) == (device == "cuda")
    assert not any("sequence=" in one for one in found) or layout.shard > 1
    for change in found:  # as it is typed: it can be laid, and takes less
        changed = from_dict(RunConfig, config.model_dump(mode="json"), overrides=change.split()).config
        laid = possible_layout(changed)
        then = memory_per_rank(changed, layout=laid, microbatch_tokens=seq_len, device=device).total_bytes
        assert then < now, change
        assert change not in oom_hints(config, layout, seq_len, device=device, memory_bytes=then - 1)
    assert oom_hints(config, layout, seq_len, device=device, memory_bytes=1.0) == []


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        (("shard=8", "sequence=auto"), Layout(shard=8)),
        (("tensor=auto", "sequence=auto"), Layout(shard=4, tensor=2)),
        (("replicate=auto",), Layout(replicate=2, shard=4)),
        (("replicate=2",), Layout(replicate=2, shard=4)),
    ],
)
def test_after_running_out_axes_that_were_auto_are_named(given: tuple[str, ...], layout: Layout) -> None:
    axes = ["train.parallel.ranks=8", *(f"train.parallel.{one}" for one in given)]
    config = from_dict(RunConfig, LLAMA_3_8B, overrides=axes).config
    found = [one for one in oom_hints(config, layout, max(config.data.seq_lens), device="cuda") if "sequence=2" in one]
    found += [one for one in oom_hints(config, layout, max(config.data.seq_lens), device="cuda") if "ranks=16" in one]
    halved, doubled = replace(layout, shard=layout.shard // 2, sequence=2), replace(layout, shard=2 * layout.shard)
    laid = [
        possible_layout(from_dict(RunConfig, config.model_dump(mode="json"), overrides=one.split()).config)
        for one in found
    ]
    assert laid == [halved, doubled]


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_a_device_that_cannot_be(size: float) -> None:
    with pytest.raises(UserError, match="is not valid"):
        largest_microbatch(example_config(), size)


# ---- against real steps ---------------------------------------------------------------------------------------------


def _differences(rank: int, *recipes: tuple[str, ...]) -> list[tuple[float, str, str]]:
    from counted_step import counted, counted_steps

    found = []
    for changes in recipes:
        config = example_config(
            "train.parallel.device=cpu", "train.global_batch_tokens=1024", "model.vocab_size=1024", *changes
        )
        predicted, real = memory_per_rank(config), counted(counted_steps(config)[-1].live)
        found.append((predicted.tensors_bytes / real.peak_bytes, predicted.peak.phase, str(real)))
    return found


_MOE = ("model.family=decoder", "model.moe={num_experts: 4, num_experts_per_tok: 2}")
_SMALL_TILES = "train.loss.chunk_bytes=2000000"
_FAST = (("train.precision.compute=fp32", _SMALL_TILES),)
_ON_ONE = (
    ("data.mask_documents=false",),
    (*_MOE, "data.mask_documents=false", "train.parallel.activation_checkpointing=full"),
)
_ON_TWO = (
    (*_MOE, "train.parallel.ranks=2"),
    ("model.tie_word_embeddings=true", _SMALL_TILES, "train.parallel.ranks=2"),
)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ranks", "recipes"),
    [
        (1, _FAST),
        (1, _ON_ONE),
        (2, _ON_TWO),
    ],
)
def test_a_real_step_holds_what_is_predicted(ranks: int, recipes: tuple[tuple[str, ...], ...]) -> None:
    """A sample; bench/plan_memory.py compares six recipes."""
    pytest.importorskip("torch")
    from gloo_ranks import run_ranks

    for of_rank in run_ranks(ranks, _differences, *recipes):
        for (ratio, phase, found), recipe in zip(of_rank, recipes, strict=True):
            assert 0.95 < ratio < 1.05, (recipe, phase, found)
