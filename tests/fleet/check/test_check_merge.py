"""Rounds of a check: what is slow by chance is not named, what is slow in all of them is; wrong stays wrong."""

import random

import pytest

from smalti.fleet.check.judge import judge
from smalti.fleet.check.merge import merge, rounds_needed


def measured(speed: float = 1.0, *, wrong: int = 0, links: float | None = 1.0) -> dict:
    flops = {"flops_per_s": 4e10 * speed, "slowest_flops_per_s": 4e10 * speed}
    link = {"bytes_per_s": {"4096": 1e6, "1048576": 1e9 * (links or 0)}, "latency_s": 1e-4, "ahead_s": 0.0}
    return {
        "products": [{"device": "cpu", "dtype": "fp32", **flops, "wrong": wrong}],
        "disk_bytes_per_s": 5e8 * speed,
        "links": [{"partner": 1, **(link if links is not None else {"problem": "timed out"})}],
    }


def test_the_best_of_each_measurement_counts_and_a_wrong_product_stays():
    report = merge(merge({}, measured(0.5, wrong=3, links=0.2)), measured(0.9, links=0.1))
    assert report["rounds"] == 2
    assert report["products"][0]["flops_per_s"] == pytest.approx(3.6e10)
    assert report["products"][0]["wrong"] == 3
    assert report["disk_bytes_per_s"] == pytest.approx(4.5e8)
    assert report["links"][0]["bytes_per_s"]["1048576"] == pytest.approx(2e8)


@pytest.mark.parametrize(("first", "second"), [(None, 1.0), (1.0, None)])
def test_a_link_that_succeeds_once_is_no_link_that_fails(first, second):
    report = merge(merge({}, measured(links=first)), measured(links=second))
    assert report["links"][0]["bytes_per_s"]["1048576"] == pytest.approx(1e9)
    assert "problem" in merge(merge({}, measured(links=None)), measured(links=None))["links"][0]


def test_the_clock_is_that_of_the_round_with_the_shorter_latency():
    late = measured()
    late["links"][0] |= {"latency_s": 0.4, "ahead_s": 0.8}
    assert merge(merge({}, late), measured())["links"][0]["ahead_s"] == 0.0


def test_a_disk_that_fails_in_a_later_round_keeps_its_speed():
    later = measured()
    del later["disk_bytes_per_s"]
    assert merge(merge({}, measured()), later)["disk_bytes_per_s"] == 5e8


def test_more_rounds_are_measured_where_something_is_slow_and_where_speeds_vary():
    nodes = [_report(f"n{number}") for number in range(4)]
    slow, wrong = [*nodes[:3], _report("n3", 0.5)], [*nodes[:3], _report("n3", wrong=1)]
    busy = [merge(report, measured(0.7)) for report in nodes]
    assert rounds_needed(nodes) == rounds_needed(wrong) == 2
    assert rounds_needed(slow) == rounds_needed([_report("n0", 0.5)], nodes[0]) == 4
    assert rounds_needed(busy) == 5
    assert rounds_needed([*busy[:3], _report("n3", 0.5)]) == 10


def test_links_that_are_far_too_slow_need_no_more_rounds_on_a_busy_machine():
    def fleet(slowest: float, product: float = 1.0) -> list[dict]:
        nodes = [merge(_report(f"n{number}"), measured(0.7)) for number in range(4)]
        nodes[0] = merge(_report("n0", product), measured(0.7 * product))
        for rank, node in enumerate(nodes):
            speeds = {other: 1e9 * (slowest if 3 in (rank, other) else 1.0) for other in range(4) if other != rank}
            node["links"] = [
                {"partner": other, "bytes_per_s": {"4096": speed}, "latency_s": 1e-4, "ahead_s": 0.0}
                for other, speed in speeds.items()
            ]
        return nodes

    assert rounds_needed(fleet(1.0)) == 5
    assert rounds_needed(fleet(0.3)) == 10
    assert rounds_needed(fleet(0.05)) == 4
    assert rounds_needed(fleet(0.05, product=0.5)) == 10, "the product may be slow by chance"


def test_healthy_nodes_on_a_machine_with_other_work_are_not_named_and_a_slow_one_is():
    """Each measurement gets between 40 and 100 % of the machine, the slow node half of that: 1,000 fleets of each."""
    draw, named = random.Random(22), {None: 0, 2: 0}
    for slow in (None, 2) * 1000:
        reports = [{"node": f"n{number}", "boot": "b", "facts": {}, "problems": []} for number in range(4)]
        while reports[0].get("rounds", 0) < rounds_needed(reports):
            factors = [0.5 if number == slow else 1.0 for number in range(4)]
            reports = [
                merge(report, {"products": measured(factor * draw.uniform(0.4, 1.0))["products"]})
                for report, factor in zip(reports, factors, strict=True)
            ]
        found = {node for finding in judge(reports) for node in finding.nodes}
        named[slow] += found == (set() if slow is None else {"n2"})
    assert named[None] >= 990
    assert named[2] >= 900


def _report(name: str, speed: float = 1.0, wrong: int = 0) -> dict:
    products = measured(speed, wrong=wrong)["products"]
    return {"node": name, "boot": "b", "facts": {}, "problems": [], "products": products}
