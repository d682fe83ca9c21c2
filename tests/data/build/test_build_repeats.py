"""Repeated passages, paragraphs, lines: what is cut equals an enumeration of all pairs, however blocks divide them."""

import json
import random
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_documents import prose

from smalti.config.build import BuildConfig
from smalti.data.build.job import build
from smalti.data.build.repeats.cut import cut_repeats
from smalti.data.build.repeats.find import blocks_of, write_cuts, write_earlier, write_hashes
from smalti.data.build.repeats.spans import find_spans, without
from smalti.data.build.why import why

SEPARATORS = {"passages": " ", "lines": "\n", "paragraphs": "\n\n"}


def enumerated(texts: Sequence[Sequence[Sequence[str]]], unit: str, min_words: int) -> list[list[str]]:
    """The words that stay of each text, which is a list of lines or paragraphs of words: every pair is compared."""
    words: list[tuple[int, str]] = []
    spans: list[tuple[int, int]] = []
    for number, parts in enumerate(texts):
        begin = len(words)
        for part in parts:
            if unit != "passages" and len(part) >= min_words:
                spans.append((len(words), len(words) + len(part)))
            words += [(number, word) for word in part]
        if unit == "passages":
            spans += [(first, first + min_words) for first in range(begin, len(words) - min_words + 1)]
    cut = set()
    for first, last in spans:
        for other, end in spans:
            if end <= first and [w for _, w in words[other:end]] == [w for _, w in words[first:last]]:
                cut.update(range(first, last))
    stay: list[list[str]] = [[] for _ in texts]
    for place, (number, word) in enumerate(words):
        if place not in cut:
            stay[number].append(word)
    return stay


def cut_in_blocks(groups: Sequence[Sequence[str]], unit: str, min_words: int, range_bytes: int) -> list[str]:
    """The texts after the three steps, each of ``groups`` a block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "texts.parquet"
        tables = [pa.table({"text": pa.array(group, pa.string()), "language": ["en"] * len(group)}) for group in groups]
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
        blocks = blocks_of(path)
        hashes = [folder / f"{number}.npy" for number in range(len(groups))]
        for file, block in zip(hashes, blocks, strict=True):
            write_hashes(file, block, unit, min_words)
        earlier = write_earlier(folder / "earlier", hashes, range_bytes)
        texts = []
        for number, (block, group) in enumerate(zip(blocks, groups, strict=True)):
            write_cuts(folder / "cuts", block, number, earlier, unit, min_words)
            runs: dict[int, list[tuple[int, int]]] = {}
            for row, first, end, _ in np.load(folder / "cuts").tolist():
                runs.setdefault(row, []).append((first, end))
            texts += [without(text, runs.get(row, [])) for row, text in enumerate(group)]
        return texts


WORD = st.sampled_from(["a", "b", "ab"])
TEXT = st.lists(st.lists(WORD, min_size=1, max_size=7), min_size=0, max_size=4)


@pytest.mark.slow  # files of every example: only here are the cuts compared with all pairs
@pytest.mark.parametrize("unit", ["passages", "lines", "paragraphs"])
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=5),
    min_words=st.integers(2, 4),
    block=st.integers(1, 5),
    range_bytes=st.sampled_from([8, 40, 1 << 20]),
)
def test_what_is_cut_equals_the_enumeration_of_all_pairs(unit, texts, min_words, block, range_bytes):
    plain = [SEPARATORS[unit].join(" ".join(part) for part in parts) for parts in texts]
    groups = [plain[at : at + block] for at in range(0, len(plain), block)]
    assert [text.split() for text in cut_in_blocks(groups, unit, min_words, range_bytes)] == enumerated(
        texts, unit, min_words
    )


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(alphabet="ab \n\t\u3042\u4e00\u0e01\u00e9\U00020000\u2003", max_size=12), max_size=4))
def test_words_are_runs_without_blanks_or_single_characters(texts):
    spans = find_spans(texts, "lines", 2)
    single = "\u3042\u4e00\u0e01\U00020000"
    expected = []
    for number, text in enumerate(texts):
        for character in single:
            text = text.replace(character, f" {character} ")
        expected += [(number, word) for word in text.split()]
    words = zip(spans.text_of_word.tolist(), spans.starts.tolist(), spans.stops.tolist(), strict=True)
    assert [(number, texts[number][start:stop]) for number, start, stop in words] == expected


def test_a_cut_keeps_the_larger_gap_and_the_indentation_of_the_first_line():
    text = "  one two CUT CUT\n\nthree CUT four\n  five CUT"
    runs = [(match, match + 3) for match in range(len(text)) if text.startswith("CUT", match)]
    runs = [(runs[0][0], runs[1][1]), *runs[2:]]
    assert without(text, runs) == "  one two\n\nthree four\n  five"
    assert without("CUT one", [(0, 3)]) == "one"
    assert without("CUT", [(0, 3)]) == ""
    assert without("三三三二", [(0, 3)]) == "二"


def write(path: Path, texts: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))


def rows(folder: Path, kind: str) -> dict[str, dict]:
    tables = [pq.read_table(path).to_pylist() for path in sorted((folder / kind).rglob("*.parquet"))]
    return {row["id"]: row for table in tables for row in table}


def sentence(rng: random.Random, n_words: int) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(n_words)) + "."


def test_a_build_cuts_a_sentence_that_many_documents_share_and_nothing_else(tmp_path):
    rng = random.Random(11)
    shared = sentence(rng, 61)
    plain = {f"plain-{i}": prose(rng) for i in range(20)}
    # Words that no other has are beside it: of others some would repeat too, and be cut with it.
    around = {f"with-{i}": (f"{prose(rng)} {sentence(rng, 2)}", f"{sentence(rng, 2)} {prose(rng)}") for i in range(40)}
    texts = plain | {name: f"{before}\n\n{shared} {after}" for name, (before, after) in around.items()}
    texts["only"] = shared
    write(tmp_path / "in" / "a.jsonl", texts)
    code = "def value():\n" + textwrap.indent(f'"""{textwrap.fill(f"Text. {shared} End.", 70)}\n"""\nreturn 1', "    ")
    (tmp_path / "in" / "b.py").write_text(code)
    config = {"name": "t", "inputs": str(tmp_path / "in"), "output": str(tmp_path / "out"), "workers": 1,
              "html": "tags", "dedup": "exact", "heldout_frac": 0.1, "repeats": "passages"}  # fmt: skip
    report = build(BuildConfig.model_validate(config))
    documents, drops = rows(tmp_path / "out", "documents"), rows(tmp_path / "out", "drops")
    assert {name: documents[name]["text"] for name in plain} == plain
    held = {row["id"] for row in pq.read_table(tmp_path / "out/documents/in/heldout.parquet").to_pylist()}
    with_sentence = {name for name in around if shared in documents[name]["text"]}
    # Held-out documents are not cut, and count as the first; there are some among the forty.
    assert with_sentence == held & set(around) != set()
    cut = {name for name in around if name not in held}
    assert all(documents[name]["text"] == f"{around[name][0]}\n\n{around[name][1]}" for name in cut)
    assert all(row["n_bytes"] == len(row["text"].encode()) for row in documents.values())
    assert documents["b.py"]["text"] == code
    assert {name: row["rule"] for name, row in drops.items()} == {"only": "repeats/passages"}
    repeats = report.values["repeats"]
    assert (repeats["documents"], repeats["words"]) == (len(cut) + 1, 61 * (len(cut) + 1))
    assert repeats["examples"][0]["words"] == 61
    assert "The longest cuts" in (tmp_path / "out" / "report.md").read_text()
    totals = [split["bytes"] for split in report.values["sources"]["in"].values()]
    assert all(count["in"] == count["kept"] + count["dropped"] + count["edited"] for count in totals)
    (fate,) = why(str(tmp_path / "out"), min(cut))
    assert shared[:120] in [change["before"] for change in fate["edits"]["examples"]]
    assert why(str(tmp_path / "out"), "only")[0]["step"] == "repeats"


def test_settings_that_have_no_effect_or_contradict_are_errors():
    plain = {"name": "t", "inputs": "in", "output": "out"}
    with pytest.raises(ValueError, match="repeat_words has no effect without repeats"):
        BuildConfig.model_validate(plain | {"repeat_words": 5})
    with pytest.raises(ValueError, match="moves the places"):
        BuildConfig.model_validate(plain | {"repeats": "lines", "pii": "mark"})


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("times", [12_000, 60_000])
def test_a_sentence_that_is_repeated_sixty_thousand_times_stays_once(tmp_path, times):
    """Several row groups, and hashes that most of them share; the published case at its size is exhaustive."""
    rng = random.Random(12)
    shared = sentence(rng, 61)
    schema = [("id", pa.string()), ("text", pa.large_string()), ("language", pa.string()), ("n_bytes", pa.int64())]
    path = tmp_path / "before" / "documents" / "web" / "train.parquet"
    path.parent.mkdir(parents=True)
    tails = [f"only{number} {sentence(rng, 2)}" for number in range(times)]
    with pq.ParquetWriter(path, pa.schema(schema)) as writer:
        for at in range(0, len(tails), 5000):
            texts = [f"{shared} {tail}" for tail in tails[at : at + 5000]]
            ids = [str(number) for number in range(at, at + len(texts))]
            columns = [ids, texts, ["en"] * len(texts), [len(text) for text in texts]]
            writer.write_table(
                pa.table(dict(zip([name for name, _ in schema], columns, strict=True)), pa.schema(schema))
            )
    pq.write_table(pa.table({name: [] for name, _ in schema}, pa.schema(schema)), path.with_name("heldout.parquet"))
    config = BuildConfig.model_validate(
        {"name": "t", "inputs": "in", "output": "out", "repeats": "passages", "workers": 2}
    )
    cut_repeats(tmp_path / "after", tmp_path / "before", config, lambda *_: None)
    texts = pq.read_table(tmp_path / "after" / "documents" / "web" / "train.parquet")["text"].to_pylist()
    assert texts == [f"{shared} {tails[0]}", *tails[1:]]
