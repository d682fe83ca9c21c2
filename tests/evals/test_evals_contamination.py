"""Contamination: planted copies are found, clean sets give no hits, and scores of clean and dirty items."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_tokenizer, write_tokens

from smalti.base.errors import DataError
from smalti.data.sources.source import Source
from smalti.data.stream.takedowns import Takedowns
from smalti.data.tokens import TokenSource
from smalti.evals.contamination.check import Check, check, write
from smalti.evals.contamination.judge import CLEAN, DIRTY, SHORT_TEXT
from smalti.evals.contamination.questions import Question, questions_of
from smalti.evals.contamination.subsets import add_subsets, newest, tasks_of
from smalti.evals.tasks.items import Item

TOKENIZER = tiny_tokenizer()


def prose(draw: random.Random, n: int) -> list[str]:
    return [f"{draw.choice('bcdfg')}{draw.choice('aeiou')}{draw.randrange(10_000)}" for _ in range(n)]


def sources(folder: Path, documents: Mapping[str, list[str]]) -> dict[str, Source]:
    for name, texts in documents.items():
        write_tokens(folder / name, TOKENIZER, texts)
    return {name: TokenSource(folder / name) for name in documents}


def checked(folder: Path, questions: list[Question], documents: list[str]) -> Check:
    return check({"t": questions}, sources(folder, {"web": documents}), TOKENIZER, folder / "index")


def exact(words: list[str], draw: random.Random) -> str:
    return " ".join(words)


def other_case(words: list[str], draw: random.Random) -> str:
    return ",\n".join(draw.choice((str.upper, str.title))(word) for word in words) + "!"


def every_thirteenth(words: list[str], draw: random.Random) -> str:
    first = draw.randrange(13)
    return " ".join("other" if i % 13 == first else word for i, word in enumerate(words))


def one_of_thirteen(words: list[str], draw: random.Random) -> str:
    changed = {start + draw.randrange(13) for start in range(0, len(words), 13)}
    return " ".join("other" if i in changed else word for i, word in enumerate(words))


@pytest.mark.parametrize(
    ("copy", "least"), [(exact, 1.0), (other_case, 1.0), (every_thirteenth, 0.95), (one_of_thirteen, 0.9)]
)
def test_planted_items_are_found_and_others_are_not(tmp_path, copy, least):
    draw = random.Random(3)
    items = [prose(draw, draw.randint(20, 80)) for _ in range(100)]
    documents = [
        " ".join([*prose(draw, 30), copy(words, draw), *prose(draw, 30)]) if i < 50 else " ".join(prose(draw, 90))
        for i, words in enumerate(items)
    ]
    result = checked(tmp_path, [Question(i, " ".join(words)) for i, words in enumerate(items)], documents)
    rows = result.judgements["t"].items
    recall = sum(row["status"] == DIRTY for row in rows[:50]) / 50
    print(f"{copy.__name__}: recall {recall:.2f} of 50 planted items of 20 to 80 words")
    assert recall >= least
    assert [row["status"] for row in rows[50:]] == [CLEAN] * 50
    assert max(row["covered_frac"] for row in rows[50:]) == 0
    assert all(row["documents"][0]["document"] == row["index"] for row in rows[:50] if row["documents"])
    assert {document.document for document in result.documents()} <= set(range(50))


def words(n: int, start: int = 0) -> str:
    return " ".join(f"w{start + i}" for i in range(n))


def one(folder: Path, question: Question, documents: list[str]) -> dict[str, object]:
    (row,) = checked(folder, [question], documents).judgements["t"].items
    return row


def test_a_phrase_of_many_documents_is_common(tmp_path):
    question = Question(0, words(40))
    assert one(tmp_path / "10", question, [words(13)] * 10)["status"] == DIRTY
    row = one(tmp_path / "11", question, [words(13)] * 11)
    assert (row["status"], row["ngrams_13"], row["covered_frac"]) == (CLEAN, 0, 13 / 40)


def test_copies_of_a_whole_question_are_not_common(tmp_path):
    row = one(tmp_path, Question(0, words(40)), [f"{i} {words(40)}" for i in range(30)])
    assert (row["status"], row["covered_frac"], row["n_documents"]) == (DIRTY, 1, 30)
    assert len(row["documents"]) == 5


def test_the_words_of_two_documents_are_not_added(tmp_path):
    row = one(tmp_path, Question(0, words(40)), [words(12), words(12, 20)])
    assert (row["status"], row["covered_frac"]) == (CLEAN, 12 / 40)


def test_short_questions(tmp_path):
    assert one(tmp_path / "7", Question(0, words(7)), [words(30)])["status"] == SHORT_TEXT
    assert one(tmp_path / "9", Question(0, words(9)), [words(30)])["status"] == DIRTY
    assert one(tmp_path / "common", Question(0, words(9)), [words(30)] * 11)["status"] == CLEAN


def test_a_template_is_not_a_part_of_its_items(tmp_path):
    template = "Read the question with care, think about it and answer in one word as in this example."
    questions = [Question(i, f"{template} {words(20, 100 * i)}") for i in range(40)]
    documents = [f"{words(9, 9000)} {template} {words(9, 9100)}", f"{template} {words(20, 300)}"]
    result = checked(tmp_path, [*questions, Question(40, f"{template} One two?")], documents)
    rows = result.judgements["t"].items
    assert [row["index"] for row in rows if row["status"] == DIRTY] == [3]
    assert (rows[3]["words"], rows[3]["covered_frac"], rows[40]["status"]) == (20, 1, SHORT_TEXT)


def test_a_found_answer_and_a_found_option(tmp_path):
    passage = Question(0, f"{words(30)} the answer", "the answer")
    assert not one(tmp_path / "passage", passage, [words(30)])["answer_found"]
    assert one(tmp_path / "whole", passage, [passage.text])["answer_found"]
    option = Question(0, words(30, 100), others=(words(14, 500),))
    row = one(tmp_path / "option", option, [words(14, 500)])
    assert (row["status"], row["covered_frac"], row["n_documents"]) == (DIRTY, 0, 1)


def test_texts_of_items_of_each_kind():
    choice = Item(1, ("Which?",), ("red", "blue", "green"), gold=1, id="a")
    schema = Item(2, ("The dog", "The cat"), ("barks.",), gold=0)
    exact_text = Item(3, ("Once upon a",), ("time",))
    generated = Item(4, ("2+2?",), (), answers=("4", "four"), reasoning="Two and two.")
    assert questions_of([choice, schema, exact_text, generated]) == [
        Question(1, "Which? blue", "blue", ("red", "green"), "a"),
        Question(2, "The dog barks.", "barks.", ("The cat",)),
        Question(3, "Once upon a time", "time"),
        Question(4, "2+2? 4", "4", ("Two and two.",)),
    ]


def test_what_is_written(tmp_path):
    documents = {"web": ["nothing", words(30)], "code": [words(30), "else"]}
    opened = sources(tmp_path, documents)
    result = check({"t": [Question(0, words(30)), Question(1, words(20, 50))]}, opened, TOKENIZER, tmp_path / "index")
    record = write(result, opened, tmp_path / "out", documents=tmp_path / "listed.jsonl", digests={"t": "ab"})
    assert record["tasks"] == {"t": {"n": 2, "clean": 1, "dirty": 1, "short": 0, "sha256": "ab"}}
    folder = Path(record["folder"])
    assert json.loads((folder / "contamination.json").read_text())["n_documents"] == 2
    assert [json.loads(line)["status"] for line in (folder / "items.jsonl").read_text().splitlines()] == [DIRTY, CLEAN]
    takedowns = Takedowns.read(str(tmp_path / "listed.jsonl"), opened)
    assert {name: len(spans) for name, spans in takedowns.spans.items()} == {"web": 1, "code": 1}
    again = check({"t": [Question(0, words(30))]}, opened, TOKENIZER, tmp_path / "index", takedowns=takedowns)
    assert again.judgements["t"].counts()["dirty"] == 0


def test_scores_of_clean_and_dirty_items(tmp_path):
    result = checked(tmp_path, [Question(0, words(30), id="a"), Question(1, words(30, 99), id="b")], [words(30)])
    folder = tmp_path / "suite" / "time"
    folder.mkdir(parents=True)
    results = {"tasks": {"t": {"accuracy": 0.5, "chance": 0.25, "sha256": "ab"}, "other": {"metric": "bits_per_byte"}}}
    samples = [{"task": "t", "index": i, "id": name, "correct": i == 0} for i, name in enumerate("ab")]
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert tasks_of(folder, {"t": "ab", "other": "ab"}) == ["t"]
    assert newest(folder.parent, {"t": "ab"}) == folder
    assert newest(folder.parent, {"t": "cd"}) is None
    add_subsets(folder, result.judgements, "where")
    score = json.loads((folder / "results.json").read_text())["tasks"]["t"]
    assert score["accuracy"] == 0.5
    subsets = score["contamination"]
    assert (subsets["dirty"]["accuracy"], subsets["clean"]["accuracy"], subsets["short"]) == (1, 0, {"n": 0})
    assert subsets["clean"]["n"] == 1
    assert subsets["path"] == "where"
    (folder / "samples.jsonl").write_text(json.dumps({"task": "t", "index": 0, "id": "other", "correct": True}))
    with pytest.raises(DataError, match="not the one that was checked"):
        add_subsets(folder, result.judgements, "where")


def test_coverage_equals_brute_force(tmp_path):
    draw = random.Random(5)
    texts = [[draw.choice(["a", "b", "c"]) for _ in range(draw.randint(26, 60))] for _ in range(30)]
    documents = [[draw.choice(["a", "b", "c"]) for _ in range(400)] for _ in range(5)]
    result = checked(
        tmp_path, [Question(i, " ".join(text)) for i, text in enumerate(texts)], [" ".join(text) for text in documents]
    )
    for text, row in zip(texts, result.judgements["t"].items, strict=True):
        best = 0
        for document in documents:
            runs = {tuple(document[i : i + 8]) for i in range(len(document) - 7)}
            covered = np.zeros(len(text), bool)
            for i in range(len(text) - 7):
                if tuple(text[i : i + 8]) in runs:
                    covered[i : i + 8] = True
            best = max(best, int(covered.sum()))
        assert row["covered_frac"] == pytest.approx(best / len(text))
