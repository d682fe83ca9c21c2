"""The reader of samples: reading and matching results, orders, flags, and scores before and after them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reading_samples import example, generated, ranked, write_results

from smalti.base.errors import DataError, UserError
from smalti.evals.reader import flags as flag_list
from smalti.evals.reader.flags import append, apply_flags, line_of, new_lines, parse_flags, read_flags
from smalti.evals.reader.order import ordered
from smalti.evals.reader.reading import Reading, read
from smalti.evals.reader.scores import task_scores
from smalti.evals.reader.text import harmless, sample_lines
from smalti.evals.samples import Sample, find_folder, paired, read_results
from smalti.evals.statistics.intervals import wilson_interval


@pytest.fixture
def reading(tmp_path: Path) -> Reading:
    example(tmp_path / "one")
    return read(str(tmp_path / "one"))


def named(reading: Reading, name: str) -> Sample:
    return next(sample for sample in reading.results.samples if sample.name == name)


def flagged(reading: Reading, *texts: str) -> Reading:
    return reading.with_lines([reading.line(text, "") for text in texts])


def test_old_and_new_names_of_the_choices_are_the_same_sample(tmp_path: Path) -> None:
    tasks = {"a": [ranked(0, 1, 0.8, key="candidates")], "b": [ranked(0, 1, 0.8)]}
    old, new = read_results(write_results(tmp_path, tasks)).samples
    assert replace(new, task="a") == old
    assert old.digest == new.digest
    assert (old.answer, old.gold_answers, old.confidence) == (" green", (" red",), pytest.approx(0.8))
    assert old.probabilities == pytest.approx([0.1, 0.8, 0.1])


def test_a_sample_may_lack_anything(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "log_likelihoods": [float("nan"), None],
            "gold": 7,
            "choice": 9,
        },
        {
            "prompt": "x",
            "choices": ["a"],
            "log_likelihoods": [-0.5],
            "gold": 0,
            "correct": False,
            "gold_probability": 0.6,
        },
        {"prompt": "\ud800 lone", "cluster": 3},
    ]
    samples = read_results(write_results(tmp_path, {"any": lines})).samples
    assert [sample.key for sample in samples] == ["0", "1", "2", "3"]
    assert samples[1].prompt == "user: Hi"
    assert samples[1].probabilities == ()
    assert samples[2].confidence is None  # the probability of what the model would say is not known
    for sample in samples:
        assert list(sample_lines(sample, None))


def test_ids_that_are_not_unique_give_way_to_indexes(tmp_path: Path) -> None:
    samples = [ranked(0, 1, 0.8) | {"id": "x"}, ranked(1, 1, 0.8) | {"id": "x"}, ranked(2, 1, 0.8) | {"id": "y"}]
    assert [sample.key for sample in read_results(write_results(tmp_path, {"t": samples})).samples] == ["0", "1", "y"]


def test_the_newest_results_are_read_of_a_run_a_suite_and_a_folder(tmp_path: Path) -> None:
    first = write_results(tmp_path, {"t": [ranked(0, 1, 0.8)]}, suite="a")
    last = write_results(tmp_path, {"t": [ranked(0, 1, 0.8)]}, suite="b")
    last = last.rename(last.with_name("2999-01-01T00-00-00.000Z"))
    (tmp_path / "samples.jsonl").write_text('{"prompt": "of smalti chat --save"}\n')
    assert find_folder(str(tmp_path)) == find_folder(str(last)) == find_folder(str(tmp_path / "evals")) == last
    assert find_folder(str(tmp_path), suite="a") == find_folder(str(tmp_path / "evals/a")) == first
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no samples in"):
        find_folder(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="there is no folder"):
        find_folder(str(tmp_path / "nowhere"))


def test_items_of_two_results_are_matched_by_id_else_by_index(tmp_path: Path) -> None:
    numbers = [generated(index, str(index), str(index)) for index in range(3)]
    one = write_results(tmp_path / "one", {"numbers": numbers, "colours": [ranked(0, 1, 0.8), ranked(1, 0, 0.8)]})
    moved = [sample | {"index": 9 - index} for index, sample in enumerate(reversed(numbers))]
    two = write_results(tmp_path / "two", {"numbers": moved, "colours": [ranked(1, 2, 0.5)]})
    both = paired(read_results(one), read_results(two))
    assert [sample.other is not None for sample in both.samples] == [True, True, True, False, True]
    assert all(sample.other.id == sample.id for sample in both.samples if sample.other)
    other = write_results(tmp_path / "three", {"colours": [ranked(1, 2, 0.5, gold=1)]})
    with pytest.raises(DataError, match="colours: A and B differ in item 1: its right answer is not the same"):
        paired(read_results(one), read_results(other))


def test_wrong_and_confident_ones_come_first(reading: Reading) -> None:
    names = [sample.name for sample in ordered(reading.results.samples, "confident")]
    assert names[:2] == ["colours:29", "colours:28"]
    assert "colours:27" not in names  # correct
    assert names[-12:][::11] == ["heldout/prose:4", "heldout/prose:0"]  # of most and of fewest bits per byte
    assert [sample.name for sample in ordered(reading.results.samples, "unparsed")] == ["numbers:q1", "numbers:q3"]
    assert [sample.name for sample in ordered(reading.results.samples, "truncated")] == ["numbers:q3"]
    assert len(ordered(reading.results.samples, "index")) == 92


def test_disagreement_puts_right_beside_wrong_first(tmp_path: Path) -> None:
    one, two = ({"t": [ranked(i, c, p) for i, (c, p) in enumerate(rows)]} for rows in (
        [(0, 0.5), (1, 0.8), (0, 0.9), (0, 0.6)], [(0, 0.9), (2, 0.9), (1, 0.9), (1, 0.5)]
    ))  # fmt: skip
    both = paired(
        read_results(write_results(tmp_path / "one", one)), read_results(write_results(tmp_path / "two", two))
    )
    assert [sample.index for sample in ordered(both.samples, "disagreement")] == [2, 3, 1]


def test_each_flag_has_its_effect_on_the_score(reading: Reading) -> None:
    before = {score.task: score.before for score in reading.scores}
    assert (before["colours"].value, before["colours"].n) == (10 / 30, 30)
    assert before["colours"].interval == wilson_interval(10, 30)
    after = flagged(
        reading,
        "colours:1=label-wrong",
        "colours:3=ambiguous",
        "colours:2=answer-acceptable",
        "heldout/prose:0=ambiguous",
    )
    colours, numbers, _, _, prose = after.scores[:5]
    assert colours.after is not None
    assert (colours.excluded, colours.accepted) == (2, 1)
    assert (colours.after.value, colours.after.n, colours.after.interval) == (10 / 28, 28, wilson_interval(10, 28))
    assert numbers.after == numbers.before
    assert prose.metric == "bits_per_byte"
    assert prose.after is not None
    nats = [70 + index * 37 % 50 for index in range(1, 12)]
    assert prose.after.value == pytest.approx(sum(nats) / 0.6931471805599453 / 1100)
    assert prose.after.n == 11


def test_the_interval_of_bits_per_byte_is_about_that_of_the_bootstrap() -> None:
    import numpy as np

    from smalti.evals.statistics.intervals import bootstrap_ratio

    generator = np.random.default_rng(0)
    sizes = generator.integers(200, 2000, 200)
    nats = sizes * generator.normal(1.0, 0.1, 200)
    rows = [
        Sample("t", index, None, "", nats=float(nats[index]), n_bytes=int(sizes[index])) for index in range(len(sizes))
    ]
    (score,) = task_scores(rows, {})
    spread = bootstrap_ratio(nats / np.log(2), sizes.astype(float), seed=1)
    assert spread is not None
    assert score.before.interval == pytest.approx(spread[1], abs=0.005)


def test_cut_samples_are_an_error(tmp_path: Path) -> None:
    rows = [ranked(index, 0, 0.8) for index in range(4)]
    folder = write_results(tmp_path, {"sums": rows}, tasks={"sums": {"n": 4}})
    assert len(read_results(folder).samples) == 4
    path = folder / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="has 3 of the 4 samples of sums"):
        read_results(folder)


def test_grades_between_right_and_wrong_have_a_mean() -> None:
    rows = [Sample("t", index, None, "", completion="x", score=index / 4) for index in range(5)]
    (score,) = task_scores(rows, {})
    assert (score.metric, score.before.value, score.before.n) == ("score", 0.5, 5)


def test_averages_of_the_gauntlet_are_shown_before_and_after(tmp_path: Path) -> None:
    tasks = {name: [ranked(i, int(i < right), 0.8) for i in range(10)] for name, right in (("copa", 2), ("piqa", 5))}
    tasks |= {"arc_easy": [ranked(i, 0, 0.8) for i in range(4)], "mine": [ranked(0, 0, 0.5)]}
    scores = dict.fromkeys(("copa", "piqa", "arc_easy"), 0.0)
    write_results(tmp_path, tasks, gauntlet={"mode": "fixed", "missing": {}, "scores": scores})
    reading = flagged(read(str(tmp_path)), "copa:0=label-wrong", "copa:1=answer-acceptable")
    rows = {score.task: score for score in reading.scores}
    assert list(rows)[4:] == ["world knowledge", "commonsense reasoning", "core average"]
    reasoning, core = rows["commonsense reasoning"], rows["core average"]
    assert (reasoning.excluded, reasoning.accepted, reasoning.before.n) == (1, 1, 2)
    assert reasoning.before.value == pytest.approx(((0.8 - 0.5) / 0.5 + 0) / 2)
    assert reasoning.after is not None
    assert core.after is not None
    assert reasoning.after.value == pytest.approx(((1 - 0.5) / 0.5 + 0) / 2)
    for average in (reasoning, core):  # what the page computes
        assert average.after is not None
        change = sum(w * (rows[t].after.value - rows[t].before.value) for t, w in average.weights.items())
        assert average.before.value + change == pytest.approx(average.after.value)
    assert len(read(str(tmp_path), task="copa").scores) == 1


def test_the_last_line_of_an_item_counts(reading: Reading) -> None:
    once = flagged(reading, "colours:1=label-wrong", "colours:1=ambiguous", "colours:2=ambiguous", "colours:2=none")
    assert {name: flag.flag for name, flag in once.applied.flags.items()} == {"colours:1": "ambiguous"}
    with pytest.raises(UserError, match="no wrong answer to accept"):
        reading.line("colours:0=answer-acceptable", "")
    with pytest.raises(UserError, match="there is no item 'colours:99'"):
        reading.line("colours:99=ambiguous", "")
    with pytest.raises(UserError, match="flag 'wrong' is not known"):
        reading.line("colours:1=wrong", "")


def test_an_acceptable_answer_is_not_another_models_answer(tmp_path: Path) -> None:
    example(tmp_path / "one")
    example(tmp_path / "two", shift=1)
    one, two = read(str(tmp_path / "one")), read(str(tmp_path / "two"))
    lines = [one.line("colours:1=answer-acceptable", ""), two.line("numbers:q2=answer-acceptable", "")]
    assert [score.accepted for score in one.with_lines(lines).scores] == [1, 0, 0, 0, 0, 0, 0]
    assert [score.accepted for score in two.with_lines(lines).scores] == [0, 1, 0, 0, 0, 0, 0]
    lines.append(two.line("colours:1=answer-acceptable", ""))  # now both answers to this item are accepted
    assert [score.accepted for score in one.with_lines(lines).scores] == [1, 0, 0, 0, 0, 0, 0]
    assert [score.accepted for score in two.with_lines(lines).scores] == [1, 1, 0, 0, 0, 0, 0]
    both = replace(read(str(tmp_path / "one"), other=str(tmp_path / "two")), lines=lines)
    assert [score.accepted for score in both.other_scores] == [1, 1, 0, 0, 0, 0, 0]


def test_a_flag_of_an_item_that_has_changed_is_reported_and_not_applied(tmp_path: Path) -> None:
    folder = write_results(tmp_path, {"t": [ranked(0, 1, 0.8), ranked(1, 1, 0.8)]})
    before = read(str(folder))
    append(before.flags_path, [before.line("t:0=ambiguous", "two right ones"), before.line("t:1=ambiguous", "")])
    write_results(tmp_path, {"t": [ranked(0, 1, 0.8) | {"prompt": "Another question?"}, ranked(1, 2, 0.5)]})
    after = read(str(tmp_path))
    assert after.applied.changed == ("t:0",)
    assert list(after.applied.flags) == ["t:1"]
    assert after.flags_path == tmp_path / "evals/flags.jsonl"


def test_the_list_only_grows_and_an_import_is_added_once(tmp_path: Path, reading: Reading) -> None:
    path = tmp_path / "list.jsonl"
    first = reading.line("colours:1=ambiguous", "line\u2028separator")
    append(path, [first])
    text = path.read_text()
    exported = [
        reading.line("colours:2=label-wrong", ""),
        first,
        {**first, "flag": None, "time": "2000-01-01T00:00:00.000Z"},
    ]
    added = new_lines(read_flags(path), exported)
    assert [line["index"] for line in added] == [2]  # the old removal of 1 is older than the list's line
    append(path, added)
    assert path.read_text().startswith(text)
    assert new_lines(read_flags(path), exported) == []
    assert read_flags(path)[0]["note"] == "line\u2028separator"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flag": "bad"}, "flag 'bad' is not one of label-wrong, ambiguous, answer-acceptable, null"),
        ({"version": 2}, "version 2 is not known"),
        ({"index": None}, "neither id nor index"),
        ({"digest": None}, "no digest"),
        ({"flag": "answer-acceptable"}, "answer-acceptable without the answer"),
    ],
)
def test_a_line_that_is_no_flag_is_named(reading: Reading, change: dict[str, Any], message: str) -> None:
    line = dict(line_of(named(reading, "colours:1"), "ambiguous"))
    text = f"{json.dumps(line)}\n\n{json.dumps(line | change)}\n"
    with pytest.raises(DataError, match=f"^mine:3: {message}"):
        parse_flags(text, "mine")
    with pytest.raises(DataError, match="mine:1: not a JSON object"):
        parse_flags("<<<<<<< HEAD\n", "mine")


def test_flags_apply_by_index_where_the_list_has_no_id(reading: Reading) -> None:
    sample = named(reading, "numbers:q1")
    line = {**line_of(sample, "ambiguous"), "index": 1}
    del line["id"]
    assert list(apply_flags([line], reading.results.samples).flags) == ["numbers:q1"]
    assert flag_list.list_version(reading.flags_path) is None


def test_the_continuation_of_contexts_is_shown_and_is_part_of_the_item(reading: Reading) -> None:
    sample = named(reading, "colours:1")
    schema = replace(sample, continuation=" is large")
    assert "  | ...  is large" in list(sample_lines(schema, None))
    assert schema.digest != sample.digest


def test_control_characters_are_written_as_escapes() -> None:
    assert harmless("a\tb\x1b[31m\r\x07\x9b\u202e\n\U0001f600") == "a   b\\x1b[31m\\r\\x07\\x9b\\u202e\n\U0001f600"


def test_a_long_prompt_is_shown_by_its_end(reading: Reading) -> None:
    lines = list(sample_lines(replace(named(reading, "colours:1"), prompt="x" * 5000 + "\nlast"), None))
    assert lines[1] == "  | (3,005 characters omitted)"
    assert lines[3] == "  | last"
    assert lines[-2].split()[:3] == [">", "0.410", "green"]
