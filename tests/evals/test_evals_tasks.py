"""Tasks of files: rows, prompts, every kind of score, and what a bad row says."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tiny_models import ByteTokenizer, UniformModel, llama_config, tiny_model

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_frac
from smalti.config.eval import EvalConfig
from smalti.config.task import TaskConfig
from smalti.evals import suite
from smalti.evals.reader.reading import read
from smalti.evals.tasks import generation
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.prompts import make_prompts
from smalti.evals.tasks.windows import chat_ids
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import Completion, generate
from smalti.serve.engine.sampling import SamplingParams
from smalti.track.report.words import share_words

GUIDE = Path(__file__).parents[2] / "docs/guides/write-a-task.md"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(llama_config(context=512)), ByteTokenizer(), name="tiny")


def _write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _choices(path: Path, n: int = 12) -> str:
    rows = [{"query": f"question {i}", "choices": ["one", "two", "three"], "gold": i % 3} for i in range(n)]
    return _write(path, rows)


def _block(kind: str, which: int = 0) -> str:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)[which]


def test_the_examples_of_the_guide(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capitals.jsonl").write_text(_block("json"))
    (tmp_path / "capitals.yaml").write_text(_block("yaml"))
    (tmp_path / "sums.jsonl").write_text(_block("json", 1))
    (tmp_path / "sums.yaml").write_text(_block("yaml", 1))
    assert all(len(_block("yaml", which).splitlines()) <= 10 for which in (0, 1))
    config = EvalConfig(tasks=[str(tmp_path / "capitals.yaml"), str(tmp_path / "sums.yaml")], seq_len=200)
    report = suite.run(engine, config, str(tmp_path))
    scores = report["tasks"]
    assert list(scores) == ["capitals", "sums"]
    assert {"accuracy", "n", "stderr", "interval", "chance", "bits_per_byte", "gold_probability"} <= set(
        scores["capitals"]
    )
    assert scores["capitals"]["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)
    assert {"truncated_frac", "unparsed_frac"} <= set(scores["sums"])
    samples = [json.loads(line) for line in Path(report["folder"], "samples.jsonl").read_text().split("\n")[:-1]]
    assert samples[0]["prompt"].split("\n")[-1] == "The capital of France is"
    assert [sample["cluster"] for sample in samples[:3]] == ["Europe", "Europe", "Asia"]
    assert samples[3]["prompt"].endswith("Question: 2 + 3\nAnswer:")
    code = _block("python").replace('Engine.from_folder("runs/demo/export")', "engine").replace("print(", "result = (")
    assert len(code.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"engine": engine}
    exec(code, namespace)
    assert namespace["result"] == scores["capitals"]["accuracy"]


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ('{"query": "a", "choices": ["x", "y"]}', ("no column 'gold'", "query, choices")),
        ('{"query": "a", "choices": ["x", "y"], "gold": 2}', ("gold = 2", "0 to 1")),
        ('{"query": "a", "choices": ["x", "y"], "gold": "z"}', ('gold = "z"', "the text of an option")),
        ('{"query": "a", "choices": ["x", "y"], "gold": true}', ("gold = true",)),
        ('{"query": "a", "choices": ["x"], "gold": 0}', ("at least 2",)),
        ('{"query": 3, "choices": ["x", "y"], "gold": 0}', ("query = 3 is not text",)),
        ('{"query": ', ("not JSON",)),
        ('["query"]', ("a JSON object",)),
    ],
)
def test_a_bad_row_is_named(line: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"query": "a\\u2028b", "choices": ["x", "y"], "gold": "y"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read_items(TaskConfig(kind="choice", file=str(path)))
    message = str(caught.value)
    assert f"{path}:3: " in message
    assert all(text in message for text in texts), message


def test_lines_end_at_a_line_feed_alone(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", [{"context": "a b\x85c", "continuation": "d"}] * 2)
    items = read_items(TaskConfig(kind="exact", file=path))
    assert [item.prompt for item in items] == ["a b\x85c"] * 2


def test_shots_do_not_depend_on_what_else_is_asked(tmp_path: Path) -> None:
    task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl"), shots=3)
    items = read_items(task)
    every = {prompt.item.index: prompt.text for prompt in make_prompts(task, items, mode="fixed")}
    some = {prompt.item.index: prompt.text for prompt in make_prompts(task, items, mode="fixed", limit=4)}
    assert len(some) == 4
    assert all(every[index] == text for index, text in some.items())
    for index, text in every.items():
        *shots, question = text.split("\n")
        assert question == f"question {index}"
        assert len(set(shots)) == 3
        assert not any(shot.startswith(f"question {index} ") for shot in shots)
    assert make_prompts(task, items, mode="fixed", limit=4) != make_prompts(task, items, mode="v0.3", limit=4)


def test_more_shots_than_rows_and_copies_of_a_row(tmp_path: Path) -> None:
    rows = [{"context": "a", "continuation": "b"}] * 3 + [{"context": "c", "continuation": "d"}]
    task = TaskConfig(kind="exact", file=_write(tmp_path / "t.jsonl", rows), shots=9)
    texts = [prompt.text for prompt in make_prompts(task, read_items(task), mode="fixed")]
    assert texts[:3] == ["c d\na"] * 3
    assert texts[3] == "a b\na b\na b\nc"


def test_a_model_without_an_opinion_scores_chance_where_gold_is_constant(tmp_path: Path) -> None:
    rows = [{"query": f"question {i}", "choices": ["yes", "not"], "gold": 0} for i in range(200)]
    task = TaskConfig(kind="choice", file=_write(tmp_path / "t.jsonl", rows))
    scores = {}
    for mode in ("fixed", "v0.3"):
        config = EvalConfig(tasks=[task], mode=mode)
        scores[mode] = suite.run(Engine(UniformModel(), ByteTokenizer()), config)["tasks"]["t"]
    assert scores["v0.3"]["accuracy"] == 1.0  # a tie goes to the first option
    assert abs(scores["fixed"]["accuracy"] - 0.5) < 0.15
    assert scores["fixed"]["majority"] == 1.0
    assert scores["fixed"]["verdict"] == "not above chance"
    assert scores["fixed"]["baseline"] == 0.5  # above a majority of 1 there is nothing


def test_the_baseline_is_the_most_frequent_label_of_the_whole_file(tmp_path: Path) -> None:
    labels = [{"query": f"q{i}", "choices": ["yes", "no"], "gold": int(i % 4 == 0)} for i in range(8)]
    texts = [{**row, "choices": [f"a{i}", f"b{i}"]} for i, row in enumerate(labels)]
    engine = Engine(UniformModel(), ByteTokenizer())
    for rows, baseline in ((labels, 0.75), (texts, 0.5)):
        task = TaskConfig(kind="choice", file=_write(tmp_path / "t.jsonl", rows))
        fixed, published = (
            suite.run(engine, EvalConfig(tasks=[task], mode=mode, limit=3))["tasks"]["t"] for mode in ("fixed", "v0.3")
        )
        assert (fixed["majority"], fixed["baseline"]) == (0.75, baseline)
        assert "baseline" not in published


def test_options_and_continuations_are_scored_as_one_text(engine: Engine, tmp_path: Path) -> None:
    task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl", 3), rank_by="sum")
    report = suite.run(engine, EvalConfig(tasks=[task]), str(tmp_path))
    for line in Path(report["folder"], "samples.jsonl").read_text().split("\n")[:-1]:
        sample = json.loads(line)
        for text, value in zip(sample["choices"], sample["log_likelihoods"], strict=True):
            ids = [256, *f"{sample['prompt']} {text}".encode()]
            assert value == pytest.approx(_log_likelihood(engine, ids, len(text) + 1), rel=1e-4)
        assert sample["choice"] == int(np.argmax(sample["log_likelihoods"]))
        assert sample["correct"] == (sample["choice"] == sample["gold"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{"context": "a", "continuation": "b"}\n{"context": "a \\ud800 b", "continuation": "c"}',
            "t.jsonl:2: the text is not Unicode",
        ),
        (
            b'{"context": "a", "continuation": "b"}\n\n{"context": "caf\xe9", "continuation": "c"}',
            "t.jsonl:3: not UTF-8",
        ),
        (
            b'{"context": "a", "continuation": "b", "id": 1}\n{"context": "c", "continuation": "d", "id": "1"}',
            "t.jsonl:2: the id '1' is that of line 1 too",
        ),
    ],
)
def test_text_that_cannot_be_a_row(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    columns = {"id": "id"} if b'"id"' in data else {}
    with pytest.raises(DataError, match=message):
        read_items(TaskConfig(kind="exact", file=str(path), columns=columns))


def test_a_byte_order_mark_and_escapes_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"context": "\\ud83d\\ude00 \\u00e9", "continuation": "b"}\n')
    (item,) = read_items(TaskConfig(kind="exact", file=str(path)))
    assert item.prompt == "😀 é"


def test_a_name_is_no_path() -> None:
    for name in ("../../evil", "a/b", "a b", ""):
        with pytest.raises(ValidationError, match="pattern"):
            TaskConfig(kind="exact", file="t.jsonl", name=name)
        with pytest.raises(ValidationError, match="pattern"):
            EvalConfig(suite=name)


class SpaceTokenizer(ByteTokenizer):
    """Bytes, and a token for ' a', so that mode v0.3 puts a space before an option."""

    def encode(self, text: str) -> list[int]:
        return list(text.replace(" a", "\0").encode())


def test_bits_per_byte_are_of_the_text_that_was_scored(tmp_path: Path) -> None:
    rows = [{"query": "which", "choices": ["b", "ccc"], "gold": gold} for gold in (0, 1)]
    task = TaskConfig(kind="choice", file=_write(tmp_path / "t.jsonl", rows))
    engine = Engine(UniformModel(), SpaceTokenizer())
    for mode, chat, n_bytes in (("v0.3", None, (2, 4)), ("fixed", None, (2, 4)), ("fixed", Chat(), (1, 3))):
        report = suite.run(engine, EvalConfig(tasks=[task], mode=mode), str(tmp_path / f"{mode}{chat}"), chat=chat)
        samples = map(json.loads, Path(report["folder"], "samples.jsonl").read_text().splitlines())
        assert tuple(sample["gold_bytes"] for sample in samples) == n_bytes
        # a uniform model has equal nats for each byte of either mode
        assert report["tasks"]["t"]["bits_per_byte"] == pytest.approx(math.log2(257))


def test_the_shots_of_a_score_are_those_of_its_prompts(engine: Engine, tmp_path: Path) -> None:
    for shots, recorded in ((2, 2), (100, 3)):
        task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl", 4), shots=shots)
        assert suite.run(engine, EvalConfig(tasks=[task]))["tasks"]["t"]["shots"] == recorded


def test_the_smaller_limit_counts(engine: Engine, tmp_path: Path) -> None:
    for own, given, n in ((3, 5, 3), (5, 3, 3), (None, 2, 2), (2, None, 2)):
        task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl"), limit=own)
        assert suite.run(engine, EvalConfig(tasks=[task], limit=given))["tasks"]["t"]["n"] == n


def test_prompts_that_would_be_cut_may_be_refused(engine: Engine, tmp_path: Path) -> None:
    task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl"), shots=3)
    config = EvalConfig(tasks=[task], seq_len=40, limit=3)
    assert suite.run(engine, config)["tasks"]["t"]["cut_frac"] == 1
    with pytest.raises(UserError, match=r"t: 3 of 3 prompts have more tokens than the longest context, 40"):
        suite.run(engine, config.model_copy(update={"cut_prompts": False}))
    words = _write(tmp_path / "w.jsonl", [{"context": "some words " * 9, "answer": "yes"}])
    generated = TaskConfig(kind="generation", file=words, max_new_tokens=2)
    with pytest.raises(UserError, match=r"w: 1 of 1 prompts have .* context, 40 less an answer of 2"):
        suite.run(engine, EvalConfig(tasks=[generated], seq_len=40, cut_prompts=False))


def _log_likelihood(engine: Engine, ids: list[int], n_scored: int) -> float:
    import torch

    with torch.no_grad():
        log_probabilities = engine.model(torch.tensor([ids])).value[0].double().log_softmax(-1)
    places = range(len(ids) - n_scored, len(ids))
    return float(sum(log_probabilities[place - 1, ids[place]] for place in places))


def test_exact_is_right_where_greedy_generation_is(engine: Engine, tmp_path: Path) -> None:
    texts = [f"some words {i}" for i in range(40)]
    rows = []
    for text, completion in zip(texts, generate(engine, texts, SamplingParams(max_tokens=1)), strict=True):
        token = completion.token_ids[0]
        continuation = chr(token) if 33 <= token < 127 else "x"
        rows.append({"context": text, "continuation": continuation})
    task = TaskConfig(kind="exact", file=_write(tmp_path / "t.jsonl", rows), continuation_delimiter="")
    report = suite.run(engine, EvalConfig(tasks=[task]))
    right = sum(row["continuation"] != "x" for row in rows)
    assert 0 < right == report["tasks"]["t"]["correct"]


def test_categories_have_equal_weight(engine: Engine, tmp_path: Path) -> None:
    rows = [{"context": f"a{i}", "continuation": "b", "part": "x" if i < 9 else "y"} for i in range(10)]
    task = TaskConfig(kind="exact", file=_write(tmp_path / "t.jsonl", rows), columns={"category": "part"})
    score = suite.run(engine, EvalConfig(tasks=[task]))["tasks"]["t"]
    parts = score["categories"]
    assert {name: part["n"] for name, part in parts.items()} == {"x": 9, "y": 1}
    assert score["accuracy"] == pytest.approx((parts["x"]["accuracy"] + parts["y"]["accuracy"]) / 2)


def test_the_reader_shows_what_was_asked_and_the_same_scores(engine: Engine, tmp_path: Path) -> None:
    schema = [
        {"context_options": [f"The cup {i}", f"The box {i}"], "continuation": "is big", "gold": i % 2} for i in (0, 1)
    ]
    rows = [{"context": f"a{i}", "answer": "b", "part": "x" if i < 3 else "y"} for i in range(4)]
    tasks = [
        TaskConfig(kind="schema", file=_write(tmp_path / "cups.jsonl", schema)),
        TaskConfig(kind="generation", file=_write(tmp_path / "t.jsonl", rows), columns={"category": "part"}),
    ]
    scores = suite.run(engine, EvalConfig(tasks=tasks), str(tmp_path))["tasks"]
    reading = read(str(tmp_path))
    assert (reading.results.samples[1].gold_answers, reading.results.samples[1].continuation) == (
        ("The box 1",),
        "is big",
    )
    for score in reading.scores:
        assert (score.before.value, list(score.before.interval or ())) == (
            scores[score.task]["value"],
            scores[score.task]["interval"],
        )


def test_one_cluster_has_no_interval(engine: Engine, tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "choices": ["a", "b"], "gold": 0, "passage": "one"} for i in range(6)]
    task = TaskConfig(kind="choice", file=_write(tmp_path / "t.jsonl", rows), columns={"cluster": "passage"})
    score = suite.run(engine, EvalConfig(tasks=[task]))["tasks"]["t"]
    assert (score["interval"], score["verdict"]) == (None, "not above chance")
    assert score["task"] == {"kind": "choice", "file": task.file, "columns": {"cluster": "passage"}}


class Chat:
    """A chat format in a few characters."""

    source = "folder/chat_template.jinja"
    stops: tuple[str, ...] = ()

    def render(self, messages):
        raise NotImplementedError

    def prompt_ids(self, messages, tokenizer, begin_id):
        (message,) = messages
        assert message["role"] == "user"
        return [begin_id, *tokenizer.encode(f"[{message['content']}]")]


def test_a_chat_model_is_asked_through_its_template(engine: Engine, tmp_path: Path) -> None:
    task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl", 3), rank_by="sum")
    score = suite.run(engine, EvalConfig(tasks=[task]), str(tmp_path), chat=Chat())["tasks"]["t"]
    assert score["chat"] == "chat_template.jinja"
    samples = next(tmp_path.glob("evals/*/*/samples.jsonl")).read_text().split("\n")[:-1]
    for sample in map(json.loads, samples):
        ids = [256, *f"[{sample['prompt']}]{sample['choices'][0]}".encode()]
        expected = _log_likelihood(engine, ids, len(sample["choices"][0]))
        assert sample["log_likelihoods"][0] == pytest.approx(expected, rel=1e-4)
    for config in (EvalConfig(tasks=[task], chat=False), EvalConfig(tasks=[task], mode="v0.3")):
        assert "chat" not in suite.run(engine, config, chat=Chat())["tasks"]["t"]


def test_the_message_of_a_chat_is_cut_and_its_template_is_not(engine: Engine) -> None:
    ids, is_cut = chat_ids(engine, Chat(), "some words and é", 8)
    assert (bytes(ids[1:]).decode(), is_cut) == ("[nd é]", True)
    assert bytes(chat_ids(engine, Chat(), "words é", 5)[0][1:]).decode() == "[é]"
    assert bytes(chat_ids(engine, Chat(), "words é", 4)[0][1:]).decode() == "[]"
    assert chat_ids(engine, Chat(), "word", 7)[1] is False
    with pytest.raises(UserError, match="the chat template has 3 tokens"):
        chat_ids(engine, Chat(), "word", 2)


def test_a_chat_model_ends_an_answer_with_its_turn(engine: Engine, tmp_path: Path, monkeypatch) -> None:
    calls = []

    def answer(engine, ids, params):
        calls.append((bytes(ids[0][1:]).decode(), params.stop))
        return [Completion("", "I think.\n\nThe result is 5", (), "stop", 1)]

    monkeypatch.setattr(generation, "generate", answer)
    rows = [{"context": "2+3", "answer": "5"}]
    task = TaskConfig(
        kind="generation", file=_write(tmp_path / "t.jsonl", rows), answer_delimiter="result is ", stop=("\n\n",)
    )
    for chat, accuracy in ((None, 0.0), (Chat(), 1.0)):
        assert suite.run(engine, EvalConfig(tasks=[task]), chat=chat)["tasks"]["t"]["accuracy"] == accuracy
    assert calls == [("2+3", ("\n\n",)), ("[2+3]", ())]


def test_long_prompts_lose_their_start(engine: Engine, tmp_path: Path) -> None:
    task = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl"), shots=5)
    score = suite.run(engine, EvalConfig(tasks=[task], seq_len=40, limit=3))["tasks"]["t"]
    assert (score["cut_frac"], score["n"]) == (1.0, 3)
    with pytest.raises(UserError, match=r"t.jsonl:1: an answer has"):
        suite.run(engine, EvalConfig(tasks=[task], seq_len=3))
    short = TaskConfig(kind="exact", file=_write(tmp_path / "s.jsonl", [{"context": "a", "continuation": "b"}]))
    report = suite.run(engine, EvalConfig(tasks=[task, short], seq_len=3))
    assert list(report["tasks"]) == ["s"]
    assert "t.jsonl:1: an answer has" in report["not_run"]["t"]


def test_an_answer_may_be_a_little_longer_than_the_right_ones(engine: Engine, tmp_path: Path) -> None:
    task = TaskConfig(kind="generation", file=_write(tmp_path / "t.jsonl", [{"context": "a", "answer": "yes"}]))
    for mode, n_tokens in (("fixed", 13), ("v0.3", 3)):
        score = suite.run(engine, EvalConfig(tasks=[task], mode=mode))["tasks"]["t"]
        assert score["max_new_tokens"] == n_tokens


def test_unknown_tasks_and_files(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no task 'bracket'(.|\n)*did you mean brackets"):
        suite.check_folders(EvalConfig(tasks=["bracket"]))
    task = TaskConfig(kind="exact", file=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"the task 'none' has no file"):
        suite.check_folders(EvalConfig(tasks=[task]))
    twice = TaskConfig(kind="choice", file=_choices(tmp_path / "t.jsonl"))
    with pytest.raises(UserError, match="two tasks have the name 't'"):
        suite.check_folders(EvalConfig(tasks=[twice, twice]))


_IFEVAL = [
    {"key": 7, "prompt": "Say it without commas. ", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {"key": 8, "prompt": "Be loud.", "instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]},
]


@pytest.mark.parametrize(("mode", "verdicts"), [("fixed", "fixed"), ("v0.3", "official")])
def test_instructions_are_verified(engine: Engine, tmp_path: Path, mode: str, verdicts: str) -> None:
    task = TaskConfig(kind="ifeval", file=_write(tmp_path / "ifeval.jsonl", _IFEVAL), max_new_tokens=6)
    report = suite.run(engine, EvalConfig(tasks=(task,), mode=mode, seq_len=100), str(tmp_path))
    score = report["tasks"]["ifeval"]
    samples = [json.loads(line) for line in (Path(report["folder"]) / "samples.jsonl").read_text().splitlines()]
    assert [sample["id"] for sample in samples] == ["7", "8"]
    assert score["verdicts"] == verdicts
    for sample in samples:
        assert sample["correct"] == all(one["strict"][verdicts] for one in sample["instructions"])
    assert score["accuracy"] == score["instructions"][verdicts]["prompt_strict"]["value"]
    assert score["truncated_frac"] == np.mean([sample["truncated"] for sample in samples])
    assert share_words(score | {"cut_frac": 0.5}) == [
        f"{format_frac(score['truncated_frac'])} of answers truncated", "50.0% of prompts cut",
    ]  # fmt: skip


def test_unknown_instructions_are_refused_before_anything_is_scored(engine: Engine, tmp_path: Path) -> None:
    rows = [{**_IFEVAL[0], "instruction_id_list": ["punctuation:no_coma"]}]
    task = TaskConfig(kind="ifeval", file=_write(tmp_path / "ifeval.jsonl", rows))
    with pytest.raises(DataError, match=r"ifeval.jsonl:1: .*no_coma"):
        suite.run(
            engine, EvalConfig(tasks=("arithmetic", task), seq_len=100), progress=lambda *_: pytest.fail("scored")
        )
    with pytest.raises(ValidationError, match="no effect with kind: ifeval"):
        TaskConfig(kind="ifeval", file="x.jsonl", shots=1)
