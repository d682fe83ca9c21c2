"""Generated tasks: right answers right, equal on every call, and no strategy without the skill beats chance."""

from collections import Counter

import numpy as np
import pytest
from tiny_models import ByteTokenizer, UniformModel, llama_config, tiny_model

from smalti.base.errors import UserError
from smalti.config.eval import EvalConfig
from smalti.evals.likelihood import score_greedy
from smalti.evals.results import TaskResult
from smalti.evals.tasks import ranked
from smalti.evals.tasks.generated import arithmetic, brackets, close
from smalti.evals.tasks.windows import differing_windows
from smalti.serve.engine.engine import Engine


def test_arithmetic_is_right() -> None:
    for index in range(300):
        item = arithmetic(index, shots=5, seed=1)
        *examples, question = item.prompt.split("\n")
        for line in examples:
            left, right = line.split("=")
            assert eval(left) == int(right)
        assert len(examples) == 5
        assert f"{eval(question[:-1])}\n" == item.choices[item.gold]
        assert question not in {line.split("=")[0] + "=" for line in examples}
        assert len(set(item.choices)) == 10
        assert {len(candidate) for candidate in item.choices} == {3}


def test_brackets_are_right() -> None:
    assert close("([{<") == ">}])"
    for index in range(300):
        item = brackets(index, shots=4, seed=1)
        *examples, question = item.prompt.split("\n")
        assert all(close(line[:4]) == line[4:] for line in examples)
        assert close(question) + "\n" == item.choices[item.gold]
        assert len(set(item.choices)) == 6
        assert not {line[4:] + "\n" for line in examples} & set(item.choices)


@pytest.mark.parametrize("make", [arithmetic, brackets])
def test_items_depend_on_seed_and_index_only(make) -> None:
    assert make(7, shots=3, seed=1) == make(7, shots=3, seed=1)
    assert make(7, shots=3, seed=1) != make(7, shots=3, seed=2)
    assert make(7, shots=3, seed=1) != make(8, shots=3, seed=1)


@pytest.mark.parametrize(("make", "k"), [(arithmetic, 10), (brackets, 6)])
def test_the_right_place_is_uniform(make, k: int) -> None:
    counts = Counter(make(index, shots=2, seed=1).gold for index in range(3000))
    assert set(counts) == set(range(k))
    chi_square = sum((counts[place] - 3000 / k) ** 2 / (3000 / k) for place in range(k))
    assert chi_square < 30  # 0.999 quantile at 9 degrees of freedom is 27.9


def _scored(name: str, engine: Engine, n: int) -> TaskResult:
    task = ranked.generated_task(name, engine, EvalConfig(n=n), 64)
    return task.result(score_greedy(engine.model, task.windows))


@pytest.mark.parametrize("task", ["arithmetic", "brackets"])
def test_a_model_that_knows_nothing_scores_chance(task: str) -> None:
    engine = Engine(UniformModel(), ByteTokenizer())
    found = _scored(task, engine, 400)
    chance = found.score["chance"]
    assert abs(found.score["value"] - chance) < 4 * (chance * (1 - chance) / 400) ** 0.5
    assert found.score["gold_probability"] == pytest.approx(found.score["chance"])
    assert len(found.samples) == found.score["n"] == 400


def test_candidates_are_scored_from_where_they_part() -> None:
    engine = Engine(tiny_model(llama_config()), ByteTokenizer())
    item = arithmetic(3, shots=2, seed=1)
    windows = differing_windows(engine, item, 64)
    shared = {tuple(window.ids[: window.first]) for window in windows}
    assert len(shared) == 1
    assert len({int(window.ids[window.first]) for window in windows}) > 1
    assert windows[0].first >= 1 + len(item.prompt)


def test_a_tokenizer_that_joins_question_and_answer_loses_nothing() -> None:
    class Joins(ByteTokenizer):
        """Takes '=4' for one token."""

        vocab_size = 258

        def encode(self, text: str) -> list[int]:
            return [257 if token == 0 else token for token in text.replace("=4", "\0").encode()]

    windows = differing_windows(
        Engine(UniformModel(258), Joins()), next(i for i in _items() if i.choices[0][0] != i.choices[-1][0]), 64
    )
    texts = ["".join("=4" if t == 257 else chr(t) for t in w.ids[w.first :]) for w in windows]
    assert len(set(texts)) == 10


def _items():
    return (item for index in range(1000) if (item := arithmetic(index, shots=1, seed=1)).choices[-1][0] == "4")


def test_a_context_too_short_for_the_question_is_refused() -> None:
    engine = Engine(UniformModel(), ByteTokenizer())
    with pytest.raises(UserError, match="longest context is 8"):
        ranked.generated_task("arithmetic", engine, EvalConfig(n=2), 8)


def test_the_likeliest_candidate_is_chosen() -> None:
    engine = Engine(tiny_model(llama_config()), ByteTokenizer())
    for sample in _scored("brackets", engine, 30).samples:
        assert sample["choice"] == int(np.argmax(sample["log_likelihoods"]))
        assert sample["correct"] == (sample["choice"] == sample["gold"])
