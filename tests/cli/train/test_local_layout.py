"""What the dry run says of the layout, and the picture of it: the ranks of each group are those of the mesh."""

import pytest
from example_config import example_config

from smalti.base.errors import UserError
from smalti.cli.train import local_layout
from smalti.cli.train.local_layout import layout_lines
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.describe import describe_layout, groups


def of(**parallel: object) -> RunConfig:
    return example_config(*(f"train.parallel.{key}={value}" for key, value in parallel.items()))


def test_one_axis_is_one_line() -> None:
    assert layout_lines(of(ranks=4), 4) == ["placement  4 ranks on auto: shard 4"]


def test_several_axes_are_drawn() -> None:
    lines = layout_lines(of(ranks=8, replicate=2, tensor=2), 8)
    assert lines[0] == "placement  8 ranks on auto: replicate 2 x shard 2 x tensor 2"
    text = "\n".join(lines)
    assert "2 ranks hold the same weights and read other rows; inside a node: 0 4 | 1 5 | ... 3 7 (4 groups)" in text
    assert "2 ranks share each matrix, a part each; inside a node: 0-1 | 2-3 | ... 6-7 (4 groups)" in text


def test_auto_says_who_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of(ranks=8, tensor="auto", device="cuda")
    assert "axes that are auto follow the simple rule" in layout_lines(config, 8)[0]
    monkeypatch.setattr(local_layout, "_local_gpus", lambda: ["NVIDIA H100 80GB HBM3"] * 8)
    assert layout_lines(config, 8)[0].endswith("axes chosen by the planner")


def test_what_cannot_be_laid_is_refused() -> None:
    with pytest.raises(UserError, match="tensor=3 is not possible"):
        layout_lines(of(ranks=6, tensor=3), 6)


def test_nodes_of_the_picture() -> None:
    lines = describe_layout(Layout(replicate=24, shard=128, expert=8), 8)
    assert lines[0] == "layout: replicate 24 x shard 128 x expert 8 = 3,072 ranks on 384 nodes of 8"
    assert lines[-1].endswith("ranks 3064-3071: replicate 23 of 24, shard 120-127 of 128")
    assert "379 nodes more" in lines[-2]
    assert len(lines) < 12


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 4, expert=2, tensor=2), Layout(shard=2, sequence=2, pipeline=2), Layout(3, 2, expert=2)],
    ids=str,
)
def test_groups_are_those_of_the_mesh(layout: Layout) -> None:
    """By hand, from the coordinates: pipeline x replicate x shard x sequence x tensor, the last the fastest."""
    sizes = {"pipeline": layout.pipeline, "replicate": layout.replicate, "shard": layout.weight_shards,
             "tensor": layout.tensor}  # fmt: skip
    place: list[dict[str, int]] = []
    for rank in range(layout.world_size):
        left, found = rank, {}
        for axis in reversed(list(sizes)):
            left, found[axis] = divmod(left, sizes[axis])
        place.append(found)
    for axis in sizes:
        for group in groups(layout, axis):  # type: ignore[arg-type]
            assert [place[rank][axis] for rank in group] == list(range(sizes[axis]))
            others = [{key: value for key, value in place[rank].items() if key != axis} for rank in group]
            assert all(other == others[0] for other in others)
