"""Real checks over four nodes on this machine: a planted fault is named with its node, healthy nodes are not."""

import random
from collections import Counter
from pathlib import Path

import pytest
from checked_nodes import FAULTS, check, named, why_not
from network_nodes import Nodes, nodes


@pytest.fixture(scope="module")
def four():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with nodes(4) as made:
        yield made


def _trial(four: Nodes, folder: Path, fault: str | None, node: str) -> set[tuple[str, str]]:
    folder.mkdir()
    return named(check(four, folder, fault, node))


@pytest.mark.slow
def test_naming_of_one_planted_fault(four, tmp_path):
    """Four real commands, the least that shows that the node with the fault is named and no other."""
    assert _trial(four, tmp_path / "trial", "wrong matmul", "n2") == {("n2", "wrong_products")}


@pytest.mark.exhaustive
def test_naming(four, proof, record, tmp_path):
    """``make prove NAME=naming``: 20 trials with a fault on a random node, and 20 without one, on an idle machine."""
    trials, draw = proof(short=0, full=20), random.Random(22)
    if not trials:
        pytest.skip("needs an idle machine; the test above is its sample")
    counts, misses = Counter[str](), list[str]()
    for number in range(trials):
        fault, node = list(FAULTS)[number % len(FAULTS)], draw.choice(four.names)
        found = _trial(four, tmp_path / f"fault-{number}", fault, node)
        others = {name for name, _ in found} - {node}
        counts["named"] += node in {name for name, _ in found}
        counts["kind_named"] += (node, FAULTS[fault]) in found
        counts["other_nodes_named"] += len(others)
        if others or (node, FAULTS[fault]) not in found:
            misses.append(f"{fault} on {node}: {sorted(found)}")
        found = _trial(four, tmp_path / f"healthy-{number}", None, node)
        counts["healthy_nodes_named"] += len({name for name, _ in found})
        counts["healthy_trials_named"] += bool(found)
        if found:
            misses.append(f"healthy: {sorted(found)}")
        print(f"trial {number}: {fault} on {node}; {counts}")
    wrong = counts["other_nodes_named"] + counts["healthy_nodes_named"]
    precision = counts["kind_named"] / max(1, counts["kind_named"] + wrong)
    recall = counts["kind_named"] / trials
    print(f"precision {precision:.3f}, recall {recall:.3f}; {misses}")
    figures = {"trials_with_fault": trials, "healthy_trials": trials, "nodes": len(four.names), **counts}
    record("naming", {**figures, "precision": precision, "recall": recall, "misses": misses})
    assert (precision, recall) == (1.0, 1.0), misses
