"""Charts: well-formed, escaped, deterministic, with all extremes and gaps."""

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.chart import (
    Bar,
    Cross,
    Marker,
    Series,
    bar_chart,
    column,
    heatmap,
    line_chart,
    stacked_area,
    standalone,
)
from smalti.base.chart.axis import log_ticks, ticks

NUMBERS = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            if name in element.attrib:
                assert -1 <= float(element.attrib[name]) <= width + 1, ET.tostring(element)
        for name in ("y", "y1", "y2", "cy"):
            if name in element.attrib:
                assert -1 <= float(element.attrib[name]) <= height + 1, ET.tostring(element)
    return root


def path_points(svg: str, kind: str = "l s0") -> list[tuple[float, float]]:
    result = re.findall(rf'<path class="{kind}" d="M([^"]*)"', svg)
    return [(float(x), float(y)) for path in result for x, y in (pair.split() for pair in path.split("L"))]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.text(max_size=8), st.lists(NUMBERS, max_size=30), st.booleans()), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_values_make_a_chart(lines: list[tuple[str, list[float], bool]], log_y: bool, from_zero: bool) -> None:
    series = [Series(_xml(name), list(range(len(y))), y, faint=faint) for name, y, faint in lines]
    parse(line_chart(series, title="any", x_label="step", log_y=log_y, from_zero=from_zero))


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), max_size=20))
def test_any_layers_make_an_area(rows: list[list[float]]) -> None:
    layers = {name: [row[index] for row in rows] for index, name in enumerate("abc")}
    parse(stacked_area(list(range(len(rows))), layers, title="mixture"))


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), min_size=0, max_size=8))
def test_any_bars(values: list[tuple[float, float]]) -> None:
    bars = [Bar(f"task {i}", v, interval=(v * 0.9, v * 1.1), reference=r) for i, (v, r) in enumerate(values)]
    parse(bar_chart(bars, title="bars"))


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=20))
def test_any_rows_make_a_heatmap(rows: list[list[float]]) -> None:
    parse(heatmap([1, 2, 5], [[abs(value) for value in row] for row in rows], title="load", row_name="expert"))


def test_a_heatmap_has_a_cell_for_each_value_in_the_colour_of_its_range() -> None:
    svg = heatmap([10, 20], [[0.0, 0.01], [1.0, 1.25], [3.99, 4.1]], title="load", row_name="expert", x_label="step")
    parse(svg)
    cells = dict(re.findall(r'<path class="q(\d)" d="([^"]*)"', svg))
    assert {level: path.count("M") for level, path in cells.items()} == {"0": 1, "1": 1, "4": 1, "6": 1, "7": 1}
    left, top = map(float, re.match(r"M([\d.]+) ([\d.]+)", cells["0"]).groups())  # type: ignore[union-attr]
    assert top < float(cells["4"].split()[1].partition("H")[0]), "the first row is at the top"
    assert left < float(cells["1"].split()[0][1:]), "the first x is at the left"
    assert "step 0 to 10\nexpert 2: 3.99\nexpert 1: 1\nat 0: expert 0<" in svg
    assert 'class="q7" x=' in svg, "the legend has every range"


def test_a_heatmap_of_many_values_stays_small() -> None:
    x = range(1, 201)
    rows = [[(expert * step) % 7 / 3 for step in x] for expert in range(256)]
    svg = heatmap(list(x), rows, title="load", row_name="expert")
    assert len(svg) < 400_000
    assert svg.count("<title>") == 23  # columns of 9 steps
    assert "no data" in heatmap([1], [[math.nan]], title="load", row_name="expert")


def _xml(text: str) -> str:
    """XML 1.0 has no way to write most control characters; names of series come from configs, which have none."""
    return "".join(c for c in text if c.isprintable())


def test_labels_are_escaped() -> None:
    evil = "<script>\"&'"
    svg = line_chart(
        [Series(evil, [0, 1], [0, 1]), Series("b", [0, 1], [1, 2])],
        title=evil,
        x_label=evil,
        markers=[Marker(0.5, evil)],
    )
    svg += stacked_area([0, 1], {evil: [1, 1]}, title=evil) + bar_chart([Bar(evil, 1, text=evil)], title=evil)
    assert "<script" not in svg
    ET.fromstring(f"<all>{svg}</all>")


def test_equal_input_equal_text() -> None:
    series = [Series("a", range(500), [math.sin(i / 9) for i in range(500)])]
    assert line_chart(series, title="t") == line_chart(series, title="t")


def test_a_spike_survives_thinning() -> None:
    values = [1.0] * 50_000
    values[31_337] = 100.0
    svg = line_chart([Series("loss", range(50_000), values)], title="t")
    points = path_points(svg)
    assert len(points) < 4 * 720
    lowest = max(y for _, y in points)
    assert min(y for _, y in points) < lowest / 4, "the spike reaches the top"
    assert len(svg) < 200_000


def test_points_are_at_their_coordinates() -> None:
    (x0, y0), (x1, y1), (x2, y2) = path_points(line_chart([Series("a", [0, 1, 2], [0, 5, 10])], title="t"))
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.02)
    assert y0 > y2


def test_logarithmic_axis() -> None:
    svg = line_chart([Series("a", [0, 1, 2, 3], [1, 10, 100, 0])], title="t", log_y=True)
    (_, a), (_, b), (_, c) = path_points(svg)
    assert a - b == pytest.approx(b - c, abs=0.02)


def test_log_x_spaces_decades_evenly_and_drops_zero() -> None:
    svg = line_chart([Series("a", [0, 1, 10, 100], [5, 1, 2, 3])], title="t", log_x=True)
    (x0, _), (x1, _), (x2, _) = path_points(svg)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)


def test_a_gap_breaks_the_line() -> None:
    svg = line_chart([Series("a", range(5), [1, 2, math.nan, 3, 4])], title="t")
    assert svg.count('class="l s0"') == 2


def test_a_chart_without_points_has_a_text() -> None:
    for svg in (
        line_chart([], title="t"),
        line_chart([Series("a", [1], [math.nan])], title="t"),
        stacked_area([], {}, title="t"),
        bar_chart([], title="t"),
    ):
        assert "no data" in svg


def test_one_point_is_a_dot_and_hover_shows_the_value() -> None:
    svg = line_chart([Series("loss", [3], [2.5])], title="t", x_label="step")
    assert '<circle class="f0"' in svg
    assert "<title>step 3\nloss: 2.5</title>" in svg


def test_colours_can_be_chosen() -> None:
    svg = line_chart([Series("a", [0, 1], [0, 1], colour=5), Series("b", [0, 1], [1, 2])], title="t")
    assert 'class="l s5"' in svg
    assert 'class="l s1"' in svg


def test_areas_fill_the_whole() -> None:
    svg = stacked_area([0, 1], {"a": [1, 3], "b": [3, 1]}, title="t")
    polygons = re.findall(r'points="([^"]*)"', svg)
    edges = [[float(p.split(",")[1]) for p in polygon.split()] for polygon in polygons]
    assert edges[0][:2] == edges[1][3:1:-1], "the upper edge of a is the lower edge of b"


def test_standalone_is_a_file() -> None:
    root = ET.fromstring(standalone(line_chart([Series("a", [0, 1], [0, 1])], title="t")))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme" in ET.tostring(root, encoding="unicode")


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low: float, size: float) -> None:
    high = low + size
    result = ticks(low, high)
    if high <= low:
        return
    assert 1 <= len(result) <= 12
    slack = 1e-6 * (abs(low) + abs(high) + size)
    assert all(low - slack <= value <= high + slack for value in result)
    assert result == sorted(result)


def test_ticks_by_example() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 0.003) == pytest.approx([0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003])
    assert ticks(5, 5) == [5]
    assert log_ticks(1e-4, 1e4) == pytest.approx([10.0**e for e in range(-4, 5)])
    assert log_ticks(2.1, 8.7) == [3, 4, 5, 6, 8]


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e6))
def test_log_ticks_are_inside(low: float, factor: float) -> None:
    result = log_ticks(low, low * factor)
    assert result == sorted(result)
    assert len(result) <= 25
    assert all(low * 0.99 <= value <= low * factor * 1.01 for value in result)


def test_a_column_of_charts() -> None:
    upper = line_chart([Series("a", [1, 2], [3, 4])], title="upper", height=200)
    lower = bar_chart([Bar("b", 1.0)], title="lower", width=500)
    root = parse(standalone(column([upper, lower], title="both <", gap=10)))
    assert root.attrib["aria-label"] == "both <"
    first, second = (one for one in root if one.tag.endswith("svg"))
    assert (first.attrib["y"], first.attrib["height"], second.attrib["y"]) == ("0", "200", "210")
    assert root.attrib["viewBox"] == f"0 0 720 {210 + int(second.attrib['height'])}"
    assert "class" not in first.attrib


def test_the_scale_holds_the_intervals_of_crosses() -> None:
    svg = line_chart([Series("a", [1, 2], [1.0, 2.0])], title="t", crosses=[Cross(1, 1.5, "c", y_interval=(-40, 60))])
    low, high = map(float, re.search(r'd="M56 ([\d.-]+)V([\d.-]+)"', svg).groups())  # type: ignore[union-attr]
    height = float(parse(svg).attrib["viewBox"].split()[3])
    assert 0 < high < low < height, "higher values are further up"


def test_a_cross_and_names_at_the_ends() -> None:
    line = Series("a family", [1, 10, 100], [1, 2, 3], named_at_end=True)
    svg = line_chart([line], title="t", log_x=True, crosses=[Cross(10, 2, "here & now", (1, 100), (1, 3))])
    assert ">a family</text>" in svg
    assert "<title>here &amp; now</title>" in svg
    assert 'cx="381"' in svg  # the middle of the logarithmic axis: 56 to 706
    assert len(re.findall(r'd="M56 [\d.]+H706M381 [\d.]+V[\d.]+"', svg)) == 1


def test_names_at_the_ends_do_not_cover_each_other() -> None:
    lines = [Series(f"line {i}", [0, 1], [0, value], named_at_end=True) for i, value in enumerate((9.8, 10, 9.9, 1))]
    found = re.findall(
        r'class="e f(\d)" x="[\d.]+" text-anchor="end" y="([\d.]+)">line (\d)<', line_chart(lines, title="t")
    )
    assert sorted(name for _, _, name in found) == list("0123")
    assert all(colour == name for colour, _, name in found)
    places = sorted(float(y) for _, y, _ in found)
    assert all(after - before >= 12 for before, after in itertools.pairwise(places)), places


def test_very_large_numbers_on_an_axis() -> None:
    svg = line_chart([Series("a", [1e21, 1e23], [1, 2])], title="t", log_x=True)
    assert ">1e22<" in svg
