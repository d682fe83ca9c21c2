"""Findings from the reports of nodes: each planted fault is named with its node, and healthy nodes are not."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import CheckFailed, RetryableError
from smalti.cli.fleet.check import raise_for
from smalti.fleet.check.judge import judge


def reports(nodes: int = 5) -> list[dict]:
    return [
        {
            "node": f"n{number}",
            "boot": "b",
            "facts": {"kernel": "6.1", "package torch": "2.13.0"},
            "problems": [],
            "disk_bytes_per_s": 5e8,
            "products": [{"device": "cpu", "dtype": "fp32", "flops_per_s": 4e10, "wrong": 0}],
            "links": [
                {"partner": other, "bytes_per_s": {"4096": 1e6, "1048576": 1e9}, "latency_s": 1e-4, "ahead_s": 1e-4}
                for other in range(nodes)
                if other != number
            ],
        }
        for number in range(nodes)
    ]


def slow_link(nodes: list[dict], first: int, second: int, speed: float | None = 4e8) -> None:
    for one, other in ((first, second), (second, first)):
        link = next(link for link in nodes[one]["links"] if link["partner"] == other)
        if speed is None:
            del link["bytes_per_s"], link["ahead_s"], link["latency_s"]
            link["problem"] = "timed out"
        else:
            link["bytes_per_s"] = {"4096": 1e6, "1048576": speed}


def plant(nodes: list[dict], kind: str, node: int) -> None:
    own = nodes[node]
    if kind == "slow_products":
        own["products"][0]["flops_per_s"] = 2e10
    elif kind == "wrong_products":
        own["products"][0]["wrong"] = 3
    elif kind == "disk":
        own["problems"].append({"kind": "disk", "message": "full"})
    elif kind == "slow_disk":
        own["disk_bytes_per_s"] = 1e7
    elif kind == "differs":
        own["facts"]["package torch"] = "2.11.0"
    elif kind == "clock":
        for link in own["links"]:
            link["ahead_s"] = 90.0
            back = next(link for link in nodes[link["partner"]]["links"] if link["partner"] == node)
            back["ahead_s"] = -90.0
    else:
        for other in range(len(nodes)):
            if other != node:
                slow_link(nodes, node, other, None if kind == "link" else 4e8)


KINDS = ("slow_products", "wrong_products", "disk", "slow_disk", "differs", "clock", "slow_link", "link")


def test_healthy_nodes_have_no_findings():
    assert judge(reports()) == judge(reports(2)) == judge(reports(1)[:1]) == []


@given(kind=st.sampled_from(KINDS), nodes=st.integers(3, 9), data=st.data())
def test_a_planted_fault_is_named_with_its_node_alone(kind, nodes, data):
    of_all = reports(nodes)
    node = data.draw(st.integers(0, nodes - 1))
    plant(of_all, kind, node)
    assert [(found.kind, found.nodes) for found in judge(of_all)] == [(kind, (f"n{node}",))]


def test_nodes_with_the_same_host_name_are_told_apart_by_their_number():
    of_all = reports(4)
    for report in of_all:
        report["node"] = "box"
    plant(of_all, "differs", 2)
    assert [(found.kind, found.nodes) for found in judge(of_all)] == [("differs", ("box (node 2)",))]


def test_two_faults_on_two_nodes_are_two_findings():
    of_all = reports(6)
    plant(of_all, "slow_products", 1)
    plant(of_all, "slow_link", 4)
    assert {(found.kind, found.nodes) for found in judge(of_all)} == {
        ("slow_products", ("n1",)),
        ("slow_link", ("n4",)),
    }


def test_a_single_slow_link_names_both_of_its_ends():
    of_all = reports(6)
    slow_link(of_all, 2, 5)
    assert [(found.kind, found.nodes) for found in judge(of_all)] == [("slow_link", ("n2", "n5"))]


def test_a_slow_link_of_a_node_that_is_slow_itself_is_not_blamed_on_its_partner():
    of_all = reports(6)
    plant(of_all, "slow_products", 5)
    slow_link(of_all, 2, 5)
    assert {(found.kind, found.nodes) for found in judge(of_all)} == {
        ("slow_products", ("n5",)),
        ("slow_link", ("n5",)),
    }


def test_a_node_that_did_not_answer_is_missing_and_not_blamed_for_its_links():
    of_all = reports(4)
    for other in (0, 1, 3):
        slow_link(of_all, other, 2, None)
    of_all[2] = None
    assert [(found.kind, found.nodes) for found in judge(of_all)] == [("missing", ("node 2",))]


def test_two_nodes_that_differ_are_both_named():
    of_all = reports(2)
    of_all[1]["facts"]["kernel"] = "6.2"
    plant(of_all, "clock", 0)
    assert {(found.kind, found.nodes) for found in judge(of_all)} == {
        ("differs", ("n0", "n1")),
        ("clock", ("n0", "n1")),
    }


@pytest.mark.parametrize("kind", ["slow_products", "slow_disk", "differs"])
def test_one_node_is_compared_with_a_saved_report(kind):
    good = reports(1)[0]
    node = [copy.deepcopy(good)]
    assert judge(node, good) == []
    plant(node, kind, 0)
    assert [found.kind for found in judge(node, good)] == [kind]


def _ends(number: int, findings: list[dict], reports: list[dict | None]) -> str:
    try:
        raise_for({"node": number, "reports": reports, "findings": findings}, own=True)
    except (CheckFailed, RetryableError) as error:
        return type(error).__name__
    return "ends"


def test_with_own_only_a_node_that_is_named_alone_for_a_fault_fails():
    here: list[dict | None] = [{"node": name} for name in ("a", "b", "c")]
    disk = {"kind": "disk", "nodes": ("b",), "message": "cannot be written"}
    with pytest.raises(CheckFailed, match="1 findings on b"):
        raise_for({"node": 0, "reports": here, "findings": [disk]}, own=False)
    assert [_ends(number, [disk], here) for number in range(3)] == ["ends", "CheckFailed", "ends"]
    assert _ends(1, [disk | {"kind": "differs"}], here) == "ends", "it was so when the run began"
    assert _ends(1, [disk | {"kind": "slow_link", "nodes": ("a", "b")}], here) == "ends", "it may be the other one"
    late = [here[0], None, here[2]]
    assert _ends(1, [{"kind": "missing", "nodes": ("node 1",), "message": ""}], late) == "CheckFailed"
    unreached: list[dict | None] = [None, here[1], None]
    assert _ends(1, [disk | {"kind": "probe"}], unreached) == "RetryableError", "who is at fault is not known"
