"""The statistics of two versions of a set: intervals, the tokens that one is worth, and when there is no difference."""

import math
import random

import pytest

from smalti.evals.data_value import words
from smalti.evals.data_value.page import page
from smalti.evals.data_value.result import compared, falling, mean_and_interval, tokens_at

TOKENS = [1000 * (i + 1) for i in range(16)]


def runs(scale: float, *, seeds: int = 3, noise: float = 0.0, sets: tuple[str, ...] = ("A", "B")) -> list[dict]:
    """Curves of a law in the tokens, of a version of which one token is worth ``scale``."""
    curves = []
    for seed in range(seeds):
        rng = random.Random(f"{scale} {seed}")
        losses = [1 + (scale * n / 1000) ** -0.5 + 0.01 * seed + rng.gauss(0, noise) for n in TOKENS]
        curves.append({"tokens": TOKENS, "bits_per_byte": {name: list(losses) for name in sets}})
    return curves


def result(*versions: list[dict]) -> dict:
    """A whole result, as the command writes it."""
    curves = dict(zip("ABCDE", versions, strict=False))
    names = versions[0][0]["bits_per_byte"]
    entry = {"documents": 9, "bytes": 900, "trained_on": 1, "near_trained": 0, "also_of": ["C"]}
    version = {"folder": "data/<x>", "documents": 9, "bytes": 900, "tokens": 2000, "epochs": 8.0}
    return {
        "time": "now", "model": "demo", "params": 1, "tokens": TOKENS[-1], "seeds": len(versions[0]),
        "versions": dict.fromkeys(curves, version), "heldout": dict.fromkeys(names, entry),
        **compared(curves), "curves": curves,
    }  # fmt: skip


def test_an_interval_is_that_of_students_t():
    mean, (low, high) = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert high - mean == pytest.approx(mean - low) == pytest.approx(4.3026527 / math.sqrt(3), rel=1e-6)


def test_a_falling_curve_is_the_nearest_one():
    assert falling([3, 2, 1]) == [3, 2, 1]
    assert falling([3, 1, 2, 0]) == [3, 1.5, 1.5, 0]
    rng = random.Random(1)
    values = [10 / (i + 1) + rng.gauss(0, 1) for i in range(12)]
    best = falling(values)
    assert best == sorted(best, reverse=True)
    for _ in range(300):
        other = falling([value + rng.gauss(0, 0.3) for value in best])
        assert sum((a - b) ** 2 for a, b in zip(best, values, strict=True)) <= sum(
            (a - b) ** 2 for a, b in zip(other, values, strict=True)
        )


def test_tokens_at_a_loss_are_interpolated():
    assert tokens_at([10, 20, 30], [3.0, 2.0, 1.0], 1.5) == 25
    assert tokens_at([10, 20, 30], [3.0, 2.0, 1.0], 5.0) == 10
    assert tokens_at([10, 20, 30], [3.0, 2.0, 1.0], 0.5) is None


@pytest.mark.parametrize(("a", "b", "better"), [(1.0, 2.0, "B"), (2.0, 1.0, "A")])
def test_a_version_worth_twice_as_much_is_found_to_be(a, b, better):
    values = result(runs(a), runs(b))
    (pair,) = values["pairs"]
    assert pair["verdict"] == f"{better} better"
    worth = pair["worth"]
    assert (worth["better"], worth["at_least"]) == (better, False)
    assert worth["ratio"] == pytest.approx(2, rel=0.02)
    assert worth["interval"][0] <= worth["ratio"] <= worth["interval"][1]
    reached = [row["worse_tokens"] for row in worth["rows"]]
    assert [tokens is None for tokens in reached] == [False, False, True, True]
    assert reached[0] == pytest.approx(2 * worth["rows"][0]["tokens"], rel=0.02)
    assert words.worth_rows(worth)[-1][2:] == ("not reached within 16k", "at least 1.00")
    assert f"{better} is better" in words.verdict(values)


def test_a_worse_version_beyond_the_first_point_gives_a_bound():
    values = result(runs(0.01), runs(1.0))
    worth = values["pairs"][0]["worth"]
    assert worth["at_least"]
    assert worth["interval"] is None
    assert worth["ratio"] == pytest.approx(16)
    assert "worth at least 16.00 of A" in words.verdict(values)


def test_equal_versions_show_no_difference_at_the_stated_rate(proof):
    n = proof(short=200, full=2000)
    shown = 0
    for case in range(n):
        rng = random.Random(case)
        ends = [[{"tokens": [1], "bits_per_byte": {"A": [rng.gauss(2, 0.1)]}} for _ in range(3)] for _ in "AB"]
        shown += compared({"A": ends[0], "B": ends[1]})["pairs"][0]["verdict"] != "no difference shown"
    assert shown / n == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / n))


def test_no_difference_has_no_worth_and_says_so():
    values = result(runs(1.0, noise=0.05), runs(1.001, noise=0.05))
    (pair,) = values["pairs"]
    assert (pair["verdict"], pair["worth"]) == ("no difference shown", None)
    assert words.verdict(values).startswith("No difference is shown")
    assert "Tokens for the same loss" not in page(values)


def test_the_mean_of_the_sets_decides_unless_further_text_is_given():
    assert result(runs(1.0), runs(2.0))["main"] == "mean"
    assert result(runs(1.0, sets=("A",)), runs(2.0, sets=("A",)))["main"] == "A"
    sets = ("A", "B", "given")
    values = result(runs(1.0, sets=sets), runs(2.0, sets=sets))
    assert (values["main"], list(values["scores"])) == ("given", [*sets])


def test_held_out_sets_that_contradict_each_other_give_no_winner():
    a, b = runs(1.0), runs(2.0)
    for good, bad in zip(a, b, strict=True):
        good["bits_per_byte"]["A"] = [value - 3 for value in good["bits_per_byte"]["A"]]
        assert bad
    values = result(a, b)
    (pair,) = values["pairs"]
    assert pair["differences"]["mean"]["verdict"] == "A better"
    assert (pair["verdict"], pair["worth"]) == ("depends on the held-out text", None)
    assert "--heldout" in words.verdict(values)
    assert pair["differences"]["B"]["verdict"] == "B better"


def test_more_versions_are_compared_with_the_first_and_with_the_one_before():
    values = result(runs(1.0), runs(2.0), runs(2.002, noise=0.05), runs(4.0))
    compared_pairs = [f"{pair['first']}{pair['second']}" for pair in values["pairs"]]
    assert compared_pairs == ["AB", "AC", "AD", "BC", "CD"]
    by_pair = dict(zip(compared_pairs, values["pairs"], strict=True))
    alone = result(runs(1.0), runs(2.0))["pairs"][0]
    assert by_pair["AB"] == alone
    assert by_pair["AD"]["worth"]["ratio"] == pytest.approx(4, rel=0.1)
    assert by_pair["BC"]["verdict"] == "no difference shown"
    assert words.verdict(values) is None
    by_name = {row[0]: row for row in words.difference_rows(values) if row[1] == "mean of these"}
    assert by_name["C - B"][4:] == ("no difference shown", "")
    assert by_name["B - A"][4:] == ("B better", "2.00 (2.00 to 2.00)")
    assert any("one in twenty" in note for note in words.notes(values))
    text = page(values)
    assert all(f'<td class="k v" data-of="">{name}</td>' in text for name in ("B - A", "D - C"))


def test_the_page_has_the_curves_and_escapes_names():
    text = page(result(runs(1.0), runs(2.0)))
    assert text.count("<svg") == 6  # two plots in two sizes, and two other held-out sets
    assert "data/&lt;x&gt;" in text
    assert "<x>" not in text
    assert "read 8.0 times" in text
    assert "C holds out the same documents as A." in text
