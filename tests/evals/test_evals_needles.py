"""Needle and copy tasks: right answers, lengths, depths, chance; training texts without a pair of the evaluation."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ByteTokenizer, UniformModel

from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig
from smalti.evals import suite
from smalti.evals.tasks import needles
from smalti.evals.tasks.generated import context_of
from smalti.evals.tasks.ranked import generated_task
from smalti.serve.engine.engine import Engine

FACT = re.compile(r"The password of the (\w+) is (\w+)\.")


def words(text: str) -> int:
    return len(text.split())


def test_the_needle_is_in_the_text_at_its_depth_and_the_others_are_candidates() -> None:
    for index in range(40):
        item = needles.needle(index, n_tokens=400, seed=1, count=words)
        text, question = item.prompt.split("\n")
        facts = dict(FACT.findall(text))
        asked = re.fullmatch(r"The password of the (\w+) is", question)
        assert asked is not None
        assert item.choices[item.gold] == f" {facts[asked[1]]}"
        assert {f" {password}" for password in facts.values()} == set(item.choices)
        assert len(facts) == len(item.choices) == 10
        low, high = map(float, re.findall(r"[\d.]+", item.category))
        begin = words(text[: text.index(f"of the {asked[1]} is")]) / words(text)
        assert low - 0.05 <= begin <= high + 0.05


def test_the_copied_span_goes_on_with_the_right_word_only() -> None:
    for index in range(40):
        item = needles.copy(index, n_tokens=300, seed=1, count=words)
        text, span = item.prompt.split("\n")
        assert f"{span}{item.choices[item.gold]}" in f"{text} "
        assert len(set(item.choices)) == 10
        low, high = map(float, re.findall(r"[\d.]+", item.category))
        assert low - 0.05 <= words(text[: text.index(span)]) / words(text) <= high + 0.05


@given(kind=st.sampled_from(["needle", "copy"]), n_tokens=st.integers(900, 1500), index=st.integers(0, 10**6))
def test_an_item_has_at_most_its_tokens_and_hardly_fewer(kind: str, n_tokens: int, index: int) -> None:
    count = len  # one token a byte
    item = needles.KINDS[kind](index, n_tokens=n_tokens, seed=3, count=count)
    longest = count(item.prompt) + max(map(count, item.choices))
    assert n_tokens - 120 <= longest <= n_tokens
    assert item == needles.KINDS[kind](index, n_tokens=n_tokens, seed=3, count=count)
    assert item != needles.KINDS[kind](index, n_tokens=n_tokens, seed=4, count=count)


@pytest.mark.parametrize("kind", ["needle", "copy"])
def test_depths_and_places_of_the_answer_are_uniform(kind: str) -> None:
    items = [needles.KINDS[kind](index, n_tokens=200, seed=1, count=words) for index in range(200)]
    assert set(Counter(item.category for item in items).values()) == {40}
    places = Counter(item.gold for item in items)
    assert sum((places[place] - 20) ** 2 / 20 for place in range(10)) < 30


def test_training_texts_are_their_seeds_and_have_no_pair_of_the_evaluation() -> None:
    texts = list(itertools.islice(needles.training_texts(1, 300), 60))
    assert texts == list(itertools.islice(needles.training_texts(1, 300), 60))
    assert texts != list(itertools.islice(needles.training_texts(2, 300), 60))
    assert all(270 <= words(text) <= 300 for text in texts)
    trained = {pair for text in texts for pair in FACT.findall(text)}
    asked = {
        pair
        for index in range(100)
        for pair in FACT.findall(needles.needle(index, n_tokens=200, seed=1, count=words).prompt)
    }
    assert min(len(trained), len(asked)) > 100
    assert not trained & asked
    for text in texts[::2]:
        haystack, *answers = text.split("\n")
        assert sorted(FACT.findall(haystack)) == sorted(FACT.findall("\n".join(answers)))
    for text in texts[1::2]:
        assert len(set(text.split("\n"))) == 1


def test_a_model_that_knows_nothing_scores_chance_at_every_depth() -> None:
    engine = Engine(UniformModel(), ByteTokenizer())
    engine.limit_tokens = 1024
    report = suite.run(engine, EvalConfig(tasks=("needle_1024", "copy_1024"), n=30))
    for score in report["tasks"].values():
        assert abs(score["value"] - 0.1) < 0.25
        assert (score["chance"], score["n_tokens"], score["verdict"]) == (0.1, 1024, "not above chance")
        assert [part["n"] for part in score["categories"].values()] == [6] * 5


def test_lengths_are_checked_before_anything_is_scored() -> None:
    engine = Engine(UniformModel(), ByteTokenizer())
    with pytest.raises(UserError, match="'needle_2048' needs a context of 2,048 tokens, and the model's longest is"):
        suite.run(engine, EvalConfig(tasks=("arithmetic", "needle_2048")))
    assert context_of("needle_512", 256, 512) == 512
    assert context_of("arithmetic", 256, 512) == 256
    with pytest.raises(UserError, match="the needles alone have"):
        generated_task("needle_64", engine, EvalConfig(n=1), 64)
    with pytest.raises(UserError, match="no room for a text and its copy"):
        generated_task("copy_64", engine, EvalConfig(n=1), 64)
    for name in ("needle_TOKENS", "needle_", "needle_0", "needles_512"):
        with pytest.raises(UserError, match="there is no task"):
            suite.check_folders(EvalConfig(tasks=(name,)))
