"""Ways to make a model answer: BM25, questions, changes to the recipe, costs, differences."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import dbrx_config, llama_config
from tiny_runs import tiny_run

from smalti.base.errors import UserError
from smalti.config.examples import ExamplesConfig
from smalti.config.run import RunConfig
from smalti.cost.params import count
from smalti.evals import results
from smalti.evals.results import TaskResult
from smalti.tune.compare import ways
from smalti.tune.compare.bm25 import Bm25
from smalti.tune.compare.page import page
from smalti.tune.compare.questions import (
    Question,
    fixed_examples,
    longest_new,
    nearest_examples,
    nearest_passages,
    read_passages,
    read_questions,
    write_tasks,
)
from smalti.tune.compare.result import break_even, compared
from smalti.tune.compare.words import notes, quality_rows

TEXTS = ["red fish", "blue fish fish", "a red red bird in a tree"]


def test_bm25_is_its_formula() -> None:
    index = Bm25(TEXTS)
    assert index.nearest("bird", 3) == [2]
    assert index.nearest("stone", 3) == []
    assert index.nearest("Fish!", 3) == [1, 0]
    mean = 12 / 3

    def score(uses: int, length: int, having: int) -> float:
        idf = math.log(1 + (3 - having + 0.5) / (having + 0.5))
        return idf * uses / (uses + 1.5 * (1 - 0.75 + 0.75 * length / mean))

    red = [score(1, 2, 2), 0.0, score(2, 7, 2)]
    blue = [0.0, score(1, 3, 1), 0.0]
    expected = sorted(range(3), key=lambda n: -(red[n] + blue[n]))
    assert index.nearest("red blue", 3) == expected
    assert index.nearest("red blue", 1) == expected[:1]


def test_bm25_ranks_as_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    texts = [" ".join(f"w{(n * k * 7) % 23}" for k in range(1, 3 + n % 9)) for n in range(60)]
    peer = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    peer.index([text.split() for text in texts], show_progress=False)
    for n in range(10):
        query = [f"w{n}", f"w{n + 7}"]
        theirs, scores = peer.retrieve([query], k=4, show_progress=False)
        distinct = len(set(scores[0].round(5).tolist())) == 4  # equal scores have no order
        ours = Bm25(texts).nearest(" ".join(query), 3)
        assert not distinct or ours == [int(number) for number in theirs[0][:3]]


def _rows(path: Path, rows: list[dict[str, Any]]) -> ExamplesConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ExamplesConfig(files=(str(path),), template="chatml", heldout_frac=0.3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_run(tmp_path_factory.mktemp("compare")) / "tokenizer")


def test_questions_are_the_held_out_examples(tokenizer: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "completion": f" {n} "} for n in range(40)]
    config = _rows(tmp_path / "a.jsonl", [*rows, rows[0]])
    questions = read_questions(config, tokenizer, 64, limit=1000)
    assert len(questions.heldout) + len(questions.train) == 40  # without the duplicate
    assert 4 < len(questions.heldout) < 20
    assert {q.prompt[0]["content"] for q in questions.heldout}.isdisjoint(
        q.prompt[0]["content"] for q in questions.train
    )
    assert all(question.prompt[-1]["content"] == f"say {question.answer}" for question in questions.heldout)


def test_the_question_of_a_conversation_is_its_last_turn(tokenizer: str, tmp_path: Path) -> None:
    def turns(n: int, *more: dict[str, str]) -> dict[str, Any]:
        first = [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}]
        return {"messages": [{"role": "system", "content": "s"}, *first, *more]}

    last = ({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"})
    config = _rows(tmp_path / "a.jsonl", [turns(n, *last) for n in range(20)])
    config = config.model_copy(update={"turns": "each"})
    questions = read_questions(config, tokenizer, 128, limit=2)
    assert [question.answer for question in questions.heldout] == ["d", "d"]
    assert len(questions.train) > 9
    assert [message["role"] for message in questions.heldout[0].prompt] == ["system", "user", "assistant", "user"]
    assert questions.heldout[0].query.endswith("\nc")


def test_texts_are_no_questions(tokenizer: str, tmp_path: Path) -> None:
    config = _rows(tmp_path / "a.jsonl", [{"text": f"a text {n}"} for n in range(20)])
    with pytest.raises(UserError, match=r"no question is held out \([1-9]\d* held-out rows"):
        read_questions(config, tokenizer, 128, limit=9)


def _question(n: int, *, system: bool = False) -> Question:
    head = ({"role": "system", "content": "s"},) if system else ()
    return Question(str(n), (*head, {"role": "user", "content": f"say number {n}"}), f"{n}")


def test_examples_are_earlier_turns_and_leave_room_for_the_answer(tmp_path: Path) -> None:
    train = [_question(n) for n in range(9)]
    asked = [_question(3, system=True)]
    messages = asked[0].after(train[:2])
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert nearest_examples(train, 2)(asked[0])[-1] == train[3]
    fixed = fixed_examples(train, 4)
    assert fixed(asked[0]) == fixed(train[0])

    def written(seq_len: int, answer_tokens: int = 1) -> Any:
        return write_tasks(
            tmp_path,
            asked,
            lambda question: train[:4],
            n_tokens=len,
            answer_tokens=[answer_tokens],
            seq_len=seq_len,
        )

    assert written(100).examples == 4
    assert written(6 + longest_new([1])).examples == 2  # system, two examples of two messages, user
    row = json.loads((tmp_path / "answers.jsonl").read_text())
    assert [message["content"] for message in row["messages"]] == [
        "s", "say number 2", "2", "say number 3", "3", "say number 3", "3",
    ]  # fmt: skip
    assert [task.name for task in written(1000, 200).tasks] == ["likelihood"]  # a long answer is not generated


def test_passages_of_documents_precede_the_question(tmp_path: Path) -> None:
    (tmp_path / "d.md").write_text("# Fish\n\nA carp is\na fish.\n \nA robin is a bird.\n\nA robin is a bird.\n")
    passages = read_passages(str(tmp_path / "d.md"))
    assert passages == ["# Fish", "A carp is\na fish.", "A robin is a bird."]
    question = Question(
        "q", ({"role": "system", "content": "s"}, {"role": "user", "content": "Is a robin red?"}), "yes"
    )
    chosen = nearest_passages(passages, 2)(question)
    assert chosen == ["A carp is\na fish.", "A robin is a bird."]
    assert question.after(chosen)[-1]["content"] == "A carp is\na fish.\n\nA robin is a bird.\n\nIs a robin red?"
    assert question.after([]) == question.prompt
    (tmp_path / "e.txt").write_text(" \n")
    for name, message in (("e.txt", "holds no text"), ("f.bin", "is no text")):
        with pytest.raises(UserError, match=message):
            read_passages(str(tmp_path / name))


def test_ways_and_their_overrides() -> None:
    assert ways.parse_ways("full,prompt") == ["prompt", "full"]
    with pytest.raises(UserError, match="no way 'lorra'"):
        ways.parse_ways("lorra")
    common, of_way = ways.split_overrides(["seed=1", "lora.train.optimizer.lr=1", "full.seed=2"])
    assert (common, of_way["lora"], of_way["full"]) == (["seed=1"], ["train.optimizer.lr=1"], ["seed=2"])
    with pytest.raises(UserError, match="retrieve trains nothing"):
        ways.split_overrides(["retrieve.seed=1"])


def _config(model: Any, adapter: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "t",
            "init_from": "x",
            "adapter": adapter,
            "model": model.model_dump(),
            "data": {"sources": {"a": "b"}, "seq_len": 32, "stages": [{"weights": {"a": 1}}], "tokenizer": "c"},
            "train": {"duration": "10step", "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
        }
    )


def test_changes_and_costs_of_training() -> None:
    plain, adapted = _config(llama_config()), _config(llama_config(), {"rank": 4})
    assert ways.changes("lora", plain) == ["adapter.rank=16", "train.optimizer.lr=0.005"]
    assert ways.changes("lora", adapted) == ways.changes("full", plain) == []
    assert ways.changes("full", adapted) == ["adapter=null", "train.optimizer.lr=0.0002"]
    assert ways.changes("continue", plain)[-1].startswith("tune.examples.roles=[")
    full, lora = ways.training_of(plain), ways.training_of(adapted)
    params = count(llama_config())
    assert full.params == params.total
    # rank 4 on q, k, v, o and three matrices of the MLP, of two layers
    assert lora.params == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert full.flops - lora.flops == pytest.approx(640 * (2 * params.matmul_active - 6 * lora.params))
    experts = ways.training_of(_config(dbrx_config(), {"rank": 4, "targets": ["experts"]}))
    whole = ways.training_of(_config(dbrx_config()))
    active = experts.params / 2  # two of four experts
    assert whole.flops - experts.flops == pytest.approx(640 * (2 * count(dbrx_config()).matmul_active - 6 * active))


def test_the_comparison_names_no_winner_inside_the_noise(tmp_path: Path) -> None:
    def entry(name: str, nats: float, right: int, flops: float, answer: float) -> dict[str, Any]:
        blank = " " if name == "prompt" else ""  # of a plain conversation
        likelihood = [
            {"index": n, "choices": ["ab"], "log_likelihoods": [-nats * (1 + n % 3)], "prompt": blank}
            for n in range(30)
        ]
        answers = [{"index": n, "answer": "ab", "correct": n < right} for n in range(30)]
        tasks = [TaskResult("likelihood", {}, likelihood), TaskResult("answers", {"wall_s": 3.0, "n": 30}, answers)]
        about = {"suite": "tune", "tasks": {task.name: task.score for task in tasks}}
        cost = {"train_flops": flops, "answer_flops": answer, "trained_params": 5, "train_s": 1.0, "kept_bytes": 0}
        cost |= {"prompt_tokens": 10.0, "answer_s": 0.1}
        return {"folder": results.write(tmp_path / name, about, tasks), "cost": cost}

    result = compared(
        {
            "prompt": entry("prompt", 2.0, 3, 0.0, 30.0),
            "lora": entry("lora", 1.0, 28, 1000.0, 10.0),
            "full": entry("full", 2.0, 4, 0.0, 40.0),
        }
    )
    lora, full = (result["ways"][way]["scores"] for way in ("lora", "full"))
    assert lora["likelihood"]["value"] == pytest.approx(2 / math.log(2) / 2)
    assert lora["likelihood"]["difference"]["verdict"] == lora["answers"]["difference"]["verdict"] == "better"
    assert lora["answers"]["interval"][0] > 0.7
    assert full["answers"]["difference"]["verdict"] == "no difference shown"
    assert full["likelihood"]["difference"]["value"] == 0
    assert result["break_even"] == {"lora": {"prompt": pytest.approx(50.0)}}
    about = {"recipe": "<r>", "model": "m", "time": "now", "questions": 30, "left_out": 2, **result}
    assert "lora has cost fewer FLOPs than prompt after 50 answers, training included." in list(notes(about))
    assert [row[3] for row in quality_rows(about)] == ["", "-1.443 better", "+0.000 not shown"]
    text = page(about)
    assert "&lt;r&gt;" in text
    assert text.count("<svg") == 3


def test_prompting_that_costs_no_more_is_never_overtaken() -> None:
    def way(answer_flops: float) -> dict[str, Any]:
        return {"cost": {"train_flops": 100.0, "answer_flops": answer_flops}}

    assert break_even({"prompt": way(5.0), "full": way(5.0)}) == {}


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    from smalti.cli.tune.compare import _plan

    with pytest.raises(UserError, match=r"lora.seed=1 has no effect"):
        _plan("instruct", ["lora.seed=1"], "prompt,full", 4, 9)
    with pytest.raises(UserError, match="retrieves nothing"):
        _plan("instruct", [], "prompt,retrieve", 0, 9)
    run = tiny_run(tmp_path)
    with pytest.raises(UserError, match="is a run"):
        _plan(str(run), [], "prompt", 4, 9)
    with pytest.raises(UserError, match="no section 'tune:'"):
        _plan("demo", [], "prompt", 4, 9)
