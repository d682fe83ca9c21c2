"""The time of a step: FLOPs of the works against the formula, parts that add up, order, published throughputs."""

import json

import numpy as np
import pytest
import torch
from example_config import VALUES, example_config
from hypothesis import given, settings
from hypothesis import strategies as st
from published_steps import ROWS
from synthetic_machine import machine, product_rate

from smalti.base.errors import UserError
from smalti.config.find import preset_names
from smalti.config.hardware import hardware
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout, layout_of
from smalti.cost.flops import train_flops_per_token, train_flops_per_token_causal
from smalti.cost.layout.collectives import collectives
from smalti.cost.layout.single_machine import single_machine_step_time
from smalti.cost.step_time import factors, rates
from smalti.cost.step_time.step import passes_of, step_time
from smalti.cost.step_time.work import Work, loss_tile, update, works
from smalti.train.cross_entropy import _cut, _Options


def preset(name: str, *more: str) -> RunConfig:
    values = json.loads(json.dumps(VALUES))
    values["model"] = {"preset": name}
    values["data"]["seq_len"] = 1024
    return from_dict(RunConfig, values, overrides=("train.global_batch_tokens=4096", *more)).config


def step_works(config: RunConfig, layout: Layout | None = None) -> list[Work]:
    config, layout = config.on("cuda"), layout or layout_of(config)
    shares = passes_of(config, layout)
    return [
        *(work for share in shares for work in works(config, share)),
        *update(config, layout, sum(share.passes for share in shares)),
    ]


def flops_of(found: list[Work]) -> float:
    return sum(work.flops * work.count for work in found)


@pytest.mark.parametrize("name", preset_names())
def test_works_have_the_flops_of_the_formula(name: str) -> None:
    for recompute in ("none", "full"):
        config = preset(name, f"train.parallel.activation_checkpointing={recompute}")
        found = step_works(config)
        flops = flops_of(found)
        assert flops == pytest.approx(train_flops_per_token_causal(config.model, 1024) * 4096, rel=1e-8)
        again = sum(work.again_flops * work.count for work in found if work.part == "recomputation")
        head = 6 * config.model.vocab_size * config.model.hidden_size * 4096
        expected = 0 if recompute == "none" else (flops - head) / 3
        assert again == pytest.approx(expected, rel=1e-8), "one more forward of the blocks"


@pytest.mark.parametrize("axis", ["replicate", "shard", "sequence", "tensor", "pipeline"])
@pytest.mark.parametrize("name", ["llama-3-8b", "dbrx-132b"])
def test_ranks_share_the_flops(axis: str, name: str) -> None:
    config = preset(name)
    whole = step_works(config, Layout())
    shared = flops_of(step_works(config, Layout(**{axis: 2}))) * 2
    twice = {"pipeline": ("loss",), "tensor": ("router",)}.get(axis, ())  # both have all of it
    more = flops_of([work for work in whole if work.part in twice])
    assert shared == pytest.approx(flops_of(whole) + more, rel=1e-8)
    assert flops_of(step_works(config, Layout(shard=2, expert=2))) * 2 == pytest.approx(flops_of(whole), rel=1e-8)


def test_parts_add_up_and_a_step_says_what_bounds_it() -> None:
    found = step_time(
        example_config(), machine(factors=dict.fromkeys(("product", "attention", "kernel", "update"), 1.0))
    )
    assert found.total_s == sum(part.s for part in found.parts)
    assert found.model_flops == train_flops_per_token(example_config().model, 256) * 8192
    low_s, high_s = found.interval_s
    assert low_s < found.total_s < high_s
    assert found.bound == "compute"
    assert json.loads(json.dumps(found.to_json()))["parts"][0]["name"] == found.parts[0].name
    assert len({part.name for part in found.parts}) == len(found.parts)


SIZES = st.tuples(
    st.sampled_from((64, 128, 256, 320)), st.integers(1, 6), st.sampled_from((256, 512, 1024)), st.integers(1, 8)
)


@settings(max_examples=15, deadline=None)
@given(SIZES, st.booleans(), st.booleans(), st.booleans())
def test_more_never_takes_less(sizes: tuple[int, int, int, int], experts: bool, recompute: bool, on_gpu: bool) -> None:
    width, layers, seq_len, rows = sizes
    device = hardware("a100-80gb") if on_gpu else machine()

    def total_s(*, width: int = width, layers: int = layers, rows: int = rows, recompute: bool = recompute) -> float:
        values = json.loads(json.dumps(VALUES))
        values["model"] |= {"hidden_size": width, "num_hidden_layers": layers, "family": "decoder"}
        values["model"]["max_position_embeddings"] = 1024
        values["model"]["moe"] = {"num_experts": 4, "num_experts_per_tok": 2} if experts else None
        values["data"]["seq_len"] = seq_len
        values["train"]["global_batch_tokens"] = rows * seq_len
        values["train"]["parallel"] = {"activation_checkpointing": "full" if recompute else "none"}
        return step_time(from_dict(RunConfig, values).config, device).total_s

    assert 0 < total_s() < total_s(layers=layers + 1)
    least_s = total_s() * (1 - 1e-12)  # rounding
    assert least_s <= total_s(rows=rows + 1)
    assert least_s <= total_s(width=2 * width), "equal where a GPU's launches take longer than the work"
    assert total_s(recompute=False) < total_s(recompute=True)


def test_microbatches_repeat_the_passes_but_not_the_update() -> None:
    one = {part.name: part for part in step_time(example_config(), machine()).parts}
    two = {part.name: part for part in step_time(example_config("train.microbatch_tokens=4096"), machine()).parts}
    assert two["optimizer"] == one["optimizer"]
    assert two["projections"].flops == one["projections"].flops
    assert two["projections"].kernels == 2 * one["projections"].kernels
    ragged = {part.name: part for part in step_time(example_config("train.microbatch_tokens=3072"), machine()).parts}
    assert ragged["projections"].kernels == 3 * one["projections"].kernels, "3072 + 3072 + 2048"
    assert ragged["projections"].flops == pytest.approx(one["projections"].flops)


def test_ranks_of_one_machine_pay_for_the_network_and_share_its_threads() -> None:
    tokens = {"batch_tokens": 8192, "seq_len": example_config().data.seq_len}
    alone = single_machine_step_time(example_config(), machine(), **tokens)
    both = single_machine_step_time(example_config("train.parallel.ranks=2"), machine(), **tokens)
    assert alone == step_time(example_config(), machine(), **tokens)
    parts = {part.name: part for part in both.parts}
    assert parts["network"].bound == "network"
    made = collectives(example_config("train.parallel.ranks=2"))
    assert parts["network"].bytes == sum(one.total_bytes for one in made)
    assert parts["network"].kernels == sum(one.count for one in made)
    assert "network" not in {part.name for part in alone.parts}
    half = {part.name: part.s for part in alone.parts}["mlp"]
    assert parts["mlp"].s == pytest.approx(half, rel=0.1), "half of the tokens on half of the threads"


def test_own_factors_and_host_time_of_a_machine() -> None:
    plain = {
        part.name: part.s for part in step_time(example_config(), machine(factors={"unit_s": 0, "product": 1})).parts
    }
    own = {
        part.name: part.s for part in step_time(example_config(), machine(factors={"unit_s": 1e-3, "product": 2})).parts
    }
    assert own["projections"] > 1.5 * plain["projections"]
    assert own["optimizer"] == plain["optimizer"]
    assert own["host"] == pytest.approx(4e-3), "three blocks and the root"
    with pytest.raises(UserError, match="names speed"):
        step_time(example_config(), machine(factors={"speed": 2}))


def test_rates_between_and_beyond_the_measured() -> None:
    grid = machine().measured.matmul["bf16"]["nt"]  # type: ignore[union-attr]
    assert rates.rate(grid, 256, 64, 1024) == pytest.approx(product_rate(256, 64, 1024, peak=4e11))
    assert rates.rate(grid, 128, 128, 128) == pytest.approx(product_rate(128, 128, 128, peak=4e11), rel=0.15)
    assert rates.rate(grid, 32, 256, 256) == pytest.approx(rates.rate(grid, 64, 256, 256) / 2), "as long as 64 rows"
    assert rates.rate(grid, 10**6, 10**4, 10**4) == pytest.approx(4e11, rel=1e-3)
    assert rates.curve(((10, 1.0), (1000, 100.0)), 100) == pytest.approx(10)
    assert rates.curve(((10, 1.0), (1000, 100.0)), 1) == 1
    assert rates.curve(((10, 1.0), (1000, 100.0)), 5000) == 500


def test_a_machine_that_knows_less_is_refused_by_name() -> None:
    kernels = {"bf16": {"add": [[1, 1e-6], [2, 2e-6]]}, "fp32": {"add": [[1, 1e-6], [2, 2e-6]]}}
    with pytest.raises(UserError, match="no kernel 'rmsnorm'"):
        step_time(example_config(), machine(kernels=kernels))
    with pytest.raises(UserError, match="no fp32 peak"):
        step_time(
            example_config("train.precision.compute=fp32"),
            hardware("a100-80gb").model_copy(update={"peak_flops_per_s": {"bf16": 312e12}}),
        )


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"),
    [(2048, 4096, 128), (4096, 32000, 768), (8192, 131072, 1024), (512, 100352, 6144)],
)
def test_tiles_are_cut_as_the_loss_cuts_them(compute: str, tokens: int, vocabulary: int, width: int) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    shapes = (tokens, width), (vocabulary, width)
    hidden, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    for cap in (None, 30.0):
        config = example_config(
            f"train.precision.compute={compute}", f"model.vocab_size={vocabulary}", f"model.hidden_size={width}",
            "model.family=decoder", f"model.final_logit_softcapping={'null' if cap is None else cap}",
        )  # fmt: skip
        options = _Options(0.0, cap, config.train.loss.tile_bytes("cuda"))
        assert loss_tile(config.on("cuda"), tokens, vocabulary) == _cut(hidden, weight, options, for_weight=True)
        with pytest.raises(AssertionError, match="chunk_bytes is auto"):
            loss_tile(config, tokens, vocabulary)


# ---- published throughputs ------------------------------------------------------------------------------------------


def test_published_mfu_is_our_formula() -> None:
    for row in ROWS:
        found = step_time(row.config, hardware(row.gpu))
        mfu = found.model_flops / row.gpus / row.step_s / hardware(row.gpu).require_peak("bf16")
        assert mfu == pytest.approx(row.mfu_percent / 100, rel=0.025), row  # their N counts norms and biases


def test_published_throughputs_lie_in_the_interval() -> None:
    errors = []
    for row in ROWS:
        found = step_time(row.config, hardware(row.gpu))
        low_s, high_s = found.interval_s
        assert low_s <= row.step_s <= high_s, row
        errors.append(found.total_s / row.step_s - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.07


@pytest.mark.parametrize(("gpu", "kept"), [("h100-sxm", factors.HOPPER), ("a100-80gb", factors.AMPERE)])
def test_factors_are_the_least_squares_fit(gpu: str, kept: factors.Factors) -> None:
    rows, device = [], hardware(gpu)
    for published in (row for row in ROWS if row.gpu == gpu):
        sums = dict.fromkeys(("product", "attention", "memory"), 0.0)
        for work in step_works(published.config):
            compute_s, memory_s = rates.compute_s(work, device, "bf16"), rates.memory_s(work, device, "bf16")
            kind = "attention" if work.kind.startswith("attention") else "product" if compute_s > memory_s else "memory"
            sums[kind] += max(compute_s, memory_s) * work.count
        rows.append([value / published.step_s for value in sums.values()])
    fitted, *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    assert fitted == pytest.approx([kept.product, kept.attention, kept.memory], rel=0.01)


def test_the_example_of_the_page() -> None:
    """docs/concepts/plan/step-time.md."""
    device = hardware("h100-sxm")
    found = step_time(preset("llama-3-8b", "data.seq_len=8192", "train.global_batch_tokens=8192"), device)
    (mlp,) = (part for part in found.parts if part.name == "mlp")
    products_s = 6 * 8192 * 3 * 4096 * 14336 * 32 / (989.4e12 * 0.8) * 1.184
    assert products_s == pytest.approx(0.4145, abs=5e-5)
    assert mlp.flops == pytest.approx(2.771e14, rel=2e-4)
    assert mlp.s == pytest.approx(products_s + 3 * 8192 * 4096 * 2 / 2 * 32 / 3.35e12 * 2.279)
    assert mlp.s == pytest.approx(0.4167, abs=5e-5)
    assert found.total_s == pytest.approx(1.32, abs=5e-3)
    assert found.interval_s == pytest.approx((1.19, 1.66), abs=5e-3)
    mfu = found.model_flops / found.total_s / 989.4e12
    assert mfu == pytest.approx(0.362, abs=5e-4)
    assert (mfu / found.high_frac, mfu / found.low_frac) == pytest.approx((0.290, 0.402), abs=5e-4)
