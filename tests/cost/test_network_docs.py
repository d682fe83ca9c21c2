"""The pages on the network and on layouts say what the code gives."""

import re
from pathlib import Path

import pytest
from published_scaling import ROWS
from test_scaling import A100, DBRX, H100, run_of

from smalti.base.errors import UserError
from smalti.config.hardware import hardware
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Group, collectives, group
from smalti.cost.layout.network import cost, links, ring
from smalti.cost.layout.predict import predict
from smalti.cost.layout.scaling import curve, dense_twin
from smalti.cost.layout.search import fastest_layout, find_layouts, smallest_gpus
from smalti.cost.params import count

DOCS = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "plan"
NETWORK, LAYOUTS = (" ".join((DOCS / name).read_text().split()) for name in ("network.md", "layouts.md"))


def test_published_beside_predicted() -> None:
    for row in ROWS:
        found = predict(row.config, hardware(row.gpu), Layout(shard=row.gpus), row.rows * row.seq_len)
        assert found.mfu is not None
        assert found.mfu_interval is not None
        low, high = found.mfu_interval
        line = (
            f"| {row.gpu} | {row.model} | {row.gpus} | {row.mfu_percent:.1f} | {found.mfu * 100:.1f} "
            f"| {low * 100:.0f} to {high * 100:.0f} |"
        )
        assert line in NETWORK


def test_example_of_a_gather() -> None:
    row = next(row for row in ROWS if (row.gpu, row.model, row.gpus) == ("h100-sxm", "7b", 512))
    made = collectives(row.config, Layout(shard=512), row.rows * 2048)
    block = next(one for one in made if one.what == "block: weights")
    assert f"{block.bytes / 1e6:.1f} MB in bf16" in NETWORK
    for gpus in (8, 512):
        simple, ll128 = ring(block.bytes, links(Group(gpus, 1), H100), passes=1)
        best = cost("all_gather", block.bytes, links(Group(gpus, 1), H100))
        assert f"{best.total_s * 1e3:.2f} ms" in NETWORK
        if gpus == 8:
            assert f"{ll128.latency_s * 1e6:.1f} us of hops and {ll128.transfer_s * 1e3:.2f} ms" in NETWORK
            assert f"{simple.latency_s * 1e6:.1f} us and {simple.transfer_s * 1e3:.2f} ms by simple" in NETWORK
        else:
            assert f"it is {ll128.latency_s * 1e3:.2f} ms and {ll128.transfer_s * 1e3:.2f} ms" in NETWORK
    through = links(group(Layout(shard=512), "shard"), H100)
    whole = sum(one.count * cost(one.op, one.bytes, through).total_s for one in made if one.axis == "shard")
    assert f"{whole:.2f} s of 1.2 s" in NETWORK


@pytest.mark.parametrize(("model", "fall"), [("7b", 7.0), ("70b", 0.9)])
def test_what_is_lost_from_128_to_512(model: str, fall: float) -> None:
    rows = {row.gpus: row for row in ROWS if row.gpu == "h100-sxm" and row.model == model}
    few, many = (predict(rows[n].config, H100, Layout(shard=n), rows[n].rows * 2048).mfu or 0 for n in (128, 512))
    assert 100 * (1 - many / few) == pytest.approx(fall, abs=0.06)
    published = 100 * (1 - rows[512].mfu_percent / rows[128].mfu_percent)
    assert f"{published:.1f} %" in NETWORK
    assert f"{fall} %" in NETWORK


def test_the_talks_curve() -> None:
    told = []
    for batch in (2**19, 2**20, 2**21):
        config = run_of("mpt-1b", batch, full=False)
        points = curve(
            config, A100, [8, 128], lambda run, n: fastest_layout(run, A100, n, data_alone=True), weak=False
        ).points
        told.append(f"{points[1].speed_up:.1f}")
    assert "prediction is {} with a batch of 0.5M tokens, {} with 1M and {} with 2M".format(*told) in NETWORK


def test_experts_beside_dense() -> None:
    twin = DBRX.model_copy(update={"model": dense_twin(DBRX.model)})
    speeds = [
        predict(run, H100, *fastest_layout(run, H100, 3072, data_alone=True)).tokens_per_s for run in (DBRX, twin)
    ]
    assert f"DBRX on 3,072 H100 is predicted at {speeds[0] / speeds[1]:.0%}".replace("%", " %") in NETWORK


def test_example_of_layouts() -> None:
    best = find_layouts(DBRX, H100, 3072, keep=3).best[0].prediction
    assert best.layout == Layout(replicate=12, shard=256)
    assert (best.microbatch_tokens, best.microbatches) == (5 * 4096, 1)
    assert f"{best.step_s:.1f}s" in LAYOUTS
    state_bytes = count(DBRX.model).total * 16
    assert f"{state_bytes / 1e12:.2f} TB" in LAYOUTS
    assert state_bytes / 24 > H100.memory_bytes > state_bytes / 25
    assert smallest_gpus(DBRX, H100, 64) == 40
    with pytest.raises(UserError, match="fits no layout"):
        find_layouts(DBRX, H100, 24)
    flat = predict(DBRX, H100, Layout(shard=3072), 5 * 4096)
    assert re.search("cost a tenth of the speed", LAYOUTS)
    assert flat.tokens_per_s / best.tokens_per_s == pytest.approx(0.91, abs=0.02)
