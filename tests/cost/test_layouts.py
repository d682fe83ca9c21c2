"""Layouts: what is returned fits and is as good as trying them all; what cannot be is refused with what can."""

import pytest
from test_scaling import DBRX, H100, run_of

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware, hardware
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.predict import predict
from smalti.cost.layout.rules import Kind, Rules, divisors
from smalti.cost.layout.search import fastest_layout, find_layouts, smallest_gpus
from smalti.cost.memory.per_rank import memory_per_rank


def fits(config: RunConfig, device: Hardware, layout: Layout, rows: int) -> bool:
    tokens = rows * config.batches_and_lengths[-1][1]
    found = memory_per_rank(config, layout=layout, microbatch_tokens=tokens, device="cuda")
    return found.total_bytes <= device.available_memory_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("gpus", [64, pytest.param(512, marks=pytest.mark.slow), 3072])
def test_what_is_returned_fits_with_the_largest_microbatch(gpus: int) -> None:
    found = find_layouts(DBRX, H100, gpus)
    assert found.best, "some layout"
    for one in found.best:
        layout, largest = one.prediction.layout, one.largest_microbatch_tokens // 4096
        assert layout.world_size == gpus
        assert fits(DBRX, H100, layout, largest)
        assert largest == -(-15_360 // layout.data_ranks) or not fits(DBRX, H100, layout, largest + 1)
        assert one.prediction.microbatch_tokens // 4096 <= largest
        assert one.memory.total_bytes <= H100.available_memory_bytes
    steps = [one.prediction.step_s for one in found.best]
    assert steps == sorted(steps)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "device", "gpus", "batch"),
    [
        ("mpt-7b", "h100-sxm", 16, 2**18),
        pytest.param("mpt-13b", "a100-40gb", 32, 2**19, marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "h100-sxm", 16, 2**19, marks=pytest.mark.slow),
    ],
)
def test_as_good_as_trying_them_all(model: str, device: str, gpus: int, batch: int) -> None:
    """Every kind, every shard, every microbatch that is a power of two: none is more than 3 % faster."""
    config, on = run_of(model, batch), hardware(device)
    rules, fastest = Rules(config, on, gpus), float("inf")
    for kind in rules.kinds():
        for replicate, shard in rules.shards(kind):
            layout = kind.layout(replicate, shard)
            for rows in (1, 2, 4, 8, 16, 32, 64):
                if rows <= -(-rules.rows // layout.data_ranks) and fits(config, on, layout, rows):
                    fastest = min(fastest, predict(config, on, layout, rows * 2048).step_s)
    assert find_layouts(config, on, gpus).best[0].prediction.step_s < 1.03 * fastest


def test_replicate_and_shard_alone_may_be_asked_for() -> None:
    layout, _ = fastest_layout(DBRX, H100, 3072, data_alone=True)
    assert layout == Layout(layout.replicate, layout.shard)


def test_others_have_their_reason() -> None:
    found = find_layouts(DBRX, H100, 3072, keep=1)
    assert found.others["pipeline 3"] == "left out: 40 layers are not a multiple"
    assert all("slower" in why or "does not fit" in why or "left out" in why for why in found.others.values())
    assert "data alone" not in found.others or "tensor 2" in found.others


def test_the_least_number_of_devices() -> None:
    """DBRX's weights, gradients and moments alone are 2.1 TB: 25 of 80 GB cannot hold it."""
    least = smallest_gpus(DBRX, H100, 3072)
    assert least is not None
    assert 32 <= least <= 64
    with pytest.raises(UserError, match="fits no layout of 24 x"):
        find_layouts(DBRX, H100, 24)
    assert smallest_gpus(run_of("mpt-125m", 2**16), H100, 8) == 1
    assert smallest_gpus(DBRX, H100, 16) is None


def test_what_does_not_fit_names_what_does() -> None:
    with pytest.raises(UserError) as refused:
        find_layouts(run_of("mpt-7b", 2**16), H100, 1)
    assert "fits no layout of 1 x NVIDIA H100" in refused.value.message
    assert "--gpus 2" in str(refused.value.hint)
    assert "activation_checkpointing" not in str(refused.value.hint)
    with pytest.raises(UserError) as refused:
        find_layouts(run_of("mpt-7b", 2**16, full=False), H100, 1)
    assert "activation_checkpointing=full" in str(refused.value.hint)


@pytest.mark.parametrize(("gpus", "says"), [(0, "1 to 1,000,000"), (-8, "1 to"), (10**30, "1 to"), (12, "multiple")])
def test_numbers_that_cannot_be(gpus: int, says: str) -> None:
    with pytest.raises(UserError) as refused:
        find_layouts(DBRX, H100, gpus)
    assert says in str(refused.value.allowed)
    if gpus == 12:
        assert refused.value.hint == "the nearest are 8 and 16"


def test_more_devices_than_rows_share_rows() -> None:
    """16 rows on 64 devices: some axis must share them."""
    found = find_layouts(run_of("mpt-1b", 16 * 2048), H100, 64)
    assert all(one.prediction.layout.data_ranks <= 16 for one in found.best)
    odd = run_of("mpt-1b", 2048)
    with pytest.raises(UserError, match="no layout of 3,072 x"):
        find_layouts(odd, H100, 3072)


def test_no_network_no_second_node() -> None:
    alone = H100.model_copy(update={"network_bytes_per_s": None})
    with pytest.raises(UserError, match="no network between nodes"):
        find_layouts(DBRX, alone, 16)


def test_rules_of_a_model() -> None:
    rules = Rules(DBRX, H100, 64)
    kinds = set(rules.kinds())
    assert {kind.tensor for kind in kinds} == {1, 2, 4, 8}
    assert {kind.expert for kind in kinds} == {1, 2, 4, 8, 16}
    assert {kind.sequence for kind in kinds} == {1}, "rows of 4,096 tokens are not split without need"
    assert {kind.sequence for kind in Rules(DBRX, H100, 64).kinds(split_rows=True)} == {1, 2, 4, 8, 16}
    assert Kind().data_alone
    assert not Kind(tensor=2).data_alone
    assert str(Kind(tensor=2, expert=4)) == "tensor 2 x expert 4"
    for kind in kinds:
        for replicate, shard in rules.shards(kind):
            layout = kind.layout(replicate, shard)
            assert layout.world_size == 64
            width = layout.weight_shards * layout.tensor
            assert width % 8 == 0 or 8 % width == 0, "inside a node, or whole nodes"


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(12, 4) == [1, 2, 3, 4]
    assert divisors(1) == [1]
    assert divisors(3072) == [n for n in range(1, 3073) if 3072 % n == 0]
