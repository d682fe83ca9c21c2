"""Steps on many devices: published curves inside the interval, parts that add up, mixtures of experts beside dense."""

import math

import pytest
from published_scaling import ROWS
from published_steps import Published

from smalti.base.errors import UserError
from smalti.config.hardware import hardware
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.flops import train_flops_per_token
from smalti.cost.layout.predict import predict
from smalti.cost.layout.scaling import curve, dense_twin, with_batch
from smalti.cost.layout.search import fastest_layout
from smalti.cost.params import count

H100, A100 = hardware("h100-sxm"), hardware("a100-40gb")


def run_of(model: str, batch_tokens: int, *, seq_len: int = 2048, full: bool = True) -> RunConfig:
    values = {
        "name": model,
        "model": {"preset": model},
        "data": {"sources": {"a": "a"}, "seq_len": seq_len, "stages": [{"weights": {"a": 1}}]},
        "train": {
            "duration": "1000step",
            "global_batch_tokens": batch_tokens,
            "optimizer": {"lr": 1e-4},
            "parallel": {"device": "cuda", "activation_checkpointing": "full" if full else "none"},
        },
    }
    return from_dict(RunConfig, values).config


DBRX = run_of("dbrx-132b", 15_360 * 4096, seq_len=4096)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.gpu}-{row.model}-{row.gpus}")
def test_published_steps_lie_in_the_interval(row: Published) -> None:
    found = predict(row.config, hardware(row.gpu), Layout(shard=row.gpus), row.rows * row.seq_len)
    assert found.step_interval_s[0] <= row.step_s <= found.step_interval_s[1]
    assert found.mfu_interval is not None
    assert found.mfu is not None
    assert found.mfu_interval[0] <= row.mfu_percent / 100 <= found.mfu_interval[1]
    assert 0.92 < row.step_s / found.step_s < 1.12, "what the module says of them"


def test_published_curves_are_met_without_a_fit() -> None:
    errors = []
    for row in ROWS:
        found = predict(row.config, hardware(row.gpu), Layout(shard=row.gpus), row.rows * row.seq_len)
        errors.append(math.log(row.step_s / found.step_s))
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.055


def test_mfu_falls_slightly_from_128_to_512_devices() -> None:
    """Published, MPT-7B on H100: 45.71, 44.15, 42.2 %."""
    row = next(row for row in ROWS if row.model == "7b" and row.gpu == "h100-sxm")
    runs = {gpus: with_batch(row.config, row.rows * row.seq_len * gpus) for gpus in (128, 256, 512)}
    mfus = [predict(run, H100, Layout(shard=gpus), row.rows * row.seq_len).mfu or 0 for gpus, run in runs.items()]
    assert mfus == sorted(mfus, reverse=True)
    assert mfus[2] / mfus[0] == pytest.approx(42.2 / 45.71, abs=0.01)


def test_one_ring_over_3072_devices_costs_more_than_sharding_in_parts() -> None:
    """Hops grow with the ring: why HSDP."""
    flat, parts = (predict(DBRX, H100, layout, 4096) for layout in (Layout(shard=3072), Layout(24, 128)))
    assert flat.step_s > 1.15 * parts.step_s


def test_parts_add_up() -> None:
    found = predict(DBRX, H100, Layout(replicate=16, shard=192), 4096)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.step_interval_s[0] < found.step_s < found.step_interval_s[1]
    assert found.tokens == 15_360 * 4096
    flops = train_flops_per_token(DBRX.model, 4096) * found.tokens
    assert found.mfu == pytest.approx(flops / found.step_s / (3072 * 989.4e12))


def test_bubble_is_stages_over_microbatches() -> None:
    """1F1B: (p - 1) / m of the works."""
    one_row = predict(DBRX, H100, Layout(replicate=12, shard=32, pipeline=8), 4096)
    assert one_row.microbatches == 40
    busy = one_row.compute_s + one_row.memory_s
    assert one_row.bubble_s / busy == pytest.approx(7 / 40, rel=0.05), "clip and update stand outside"


@pytest.mark.parametrize(("model", "least"), [("mpt-1b", 13.0), ("mpt-3b", 13.5), ("mpt-7b", 14.0)])
def test_eight_to_128_devices_with_one_batch(model: str, least: float) -> None:
    """The talk: the same GPT and batch on 8 and 128 GPUs, 14.4 times as fast (of 16)."""
    config = run_of(model, 2_097_152)

    def spread(run: RunConfig, gpus: int) -> tuple[Layout, int]:
        return Layout(shard=gpus), 8 * 2048

    points = curve(config, A100, [8, 128], spread, weak=False).points
    assert points[1].ideal == 16
    assert least < points[1].speed_up < 16.05


def test_weak_scaling_keeps_the_batch_of_a_device() -> None:
    points = curve(DBRX, H100, [512, 3072], lambda run, gpus: (Layout(gpus // 128, 128), 4096), weak=True).points
    assert points[0].prediction.tokens * 6 == points[1].prediction.tokens == 15_360 * 4096
    assert 0.9 < points[1].efficiency_frac < 1


def test_experts_beside_a_dense_model_of_as_many_active_parameters() -> None:
    twin = dense_twin(DBRX.model)
    active, dense = count(DBRX.model).active, count(twin).total
    assert dense == pytest.approx(active, rel=2e-4)
    assert twin.moe is None
    layout, microbatch = fastest_layout(DBRX, H100, 3072, data_alone=True)
    experts = predict(DBRX, H100, layout, microbatch)
    beside = predict(DBRX.model_copy(update={"model": twin}), H100, layout, microbatch)
    assert 0.75 < experts.tokens_per_s / beside.tokens_per_s < 1
    with pytest.raises(UserError, match="dense already"):
        dense_twin(twin)


def test_missing_points_say_why() -> None:
    found = curve(DBRX, H100, [8, 3072], lambda run, gpus: fastest_layout(run, H100, gpus), weak=False)
    assert [point.prediction.gpus for point in found.points] == [3072]
    assert "fits no layout of 8 x NVIDIA H100" in found.missing[8]
    with pytest.raises(UserError, match="whole numbers"):
        curve(DBRX, H100, [0], lambda run, gpus: (Layout(), 4096), weak=False)
