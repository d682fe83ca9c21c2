"""The whole curation: it adds up, repeats itself to the byte, and keeps training apart from held-out."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from smalti.base.errors import DataError, UserError
from smalti.config.curate import CurateConfig
from smalti.config.dedup import DedupConfig
from smalti.data.documents.heldout import split_of
from smalti.data.documents.parquet import DROP_SCHEMA, read_documents
from smalti.data.prepare.curate.job import curate
from smalti.data.prepare.dedup.job import dedup

SENTENCE = "The function returns the number {} of the items that it has been given by the caller."


def config(folder: Path, **changes) -> CurateConfig:
    plain = {
        "sources": {"a": {"path": str(folder / "a.jsonl"), "id_field": "id"}},
        "output": str(folder / "out"),
        "group_field": "group",
        "heldout_frac": 0.3,
    }
    return CurateConfig.model_validate({**plain, **changes})


def write(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def record(number: int, text: str | None = None, group: str | None = None) -> dict:
    return {"id": f"d{number}", "text": text or SENTENCE.format(number), "group": group or f"g{number}"}


def group_on(split: str, start: int = 0) -> str:
    return next(f"s{i}" for i in range(start, 10_000) if split_of(f"s{i}", seed=17, heldout_frac=0.3) == split)


def kept(folder: Path, source: str, split: str) -> list[dict]:
    return list(read_documents(folder / "out" / "documents" / source / f"{split}.parquet"))


def drops(folder: Path, source: str) -> list[dict]:
    return pq.read_table(folder / "out" / "drops" / f"{source}.parquet").to_pylist()


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_document_is_kept_or_dropped_with_a_reason(tmp_path):
    records = [record(i) for i in range(40)]
    records += [record(40, "Too short."), record(41, SENTENCE.format(3) + "  \r\n"), record(42, "\x00 \n")]
    write(tmp_path / "a.jsonl", records)
    report = curate(config(tmp_path))
    ids = [row["id"] for split in ("train", "heldout") for row in kept(tmp_path, "a", split)]
    gone = drops(tmp_path, "a")
    assert sorted(ids + [row["id"] for row in gone]) == sorted(row["id"] for row in records)
    rules = {row["id"]: (row["rule"], row["score"]) for row in gone}
    assert rules["d40"] == ("prose-light/words", 2.0)
    assert rules["d42"] == ("normalize/empty", 0.0)
    assert {"d3", "d41"} & rules.keys()
    assert pq.read_schema(tmp_path / "out" / "drops" / "a.parquet").names == DROP_SCHEMA.names
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    for split, account in saved["sources"]["a"].items():
        documents, sizes = account["documents"], account["bytes"]
        assert documents["in"] == documents["kept"] + documents["dropped"]
        assert sizes["in"] == sizes["kept"] + sizes["dropped"] + sizes["edited"]
        assert documents["kept"] == len(kept(tmp_path, "a", split))
        assert sizes["kept"] == sum(len(row["text"].encode()) for row in kept(tmp_path, "a", split))
        assert all(row["n_bytes"] == len(row["text"].encode()) for row in kept(tmp_path, "a", split))
    assert sum(account["documents"]["in"] for account in saved["sources"]["a"].values()) == len(records)
    assert report.as_json().items() <= saved.items()
    assert "prose-light/words" in (tmp_path / "out" / "report.md").read_text()


def test_listed_documents_are_dropped_with_their_duplicates(tmp_path):
    records = [record(i, group=group_on("train")) for i in range(6)]
    records += [record(6, SENTENCE.format(2), group=group_on("train")), record(7, "Too short.")]
    write(tmp_path / "a.jsonl", records)
    listed = tmp_path / "listed.jsonl"
    write(listed, [{"source": "a", "document": name} for name in ("d2", "d4", "d7", "gone")])
    report = curate(config(tmp_path, drop_documents=str(listed)))
    assert [row["id"] for row in kept(tmp_path, "a", "train")] == ["d0", "d1", "d3", "d5"]
    rules = {row["id"]: row["rule"] for row in drops(tmp_path, "a")}
    assert rules == {"d2": "drop_documents", "d4": "drop_documents", "d6": "dedup/exact", "d7": "prose-light/words"}
    assert [note for note in report.notes() if "drop_documents" in note] == [
        "1 document in drop_documents: not in the sources, or with another id"
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"source": "b", "document": "d1"}, "line 1: 'b' is not a source"),
        ({"source": "a", "document": 1}, "line 1: 1 is not an id"),
        ({"source": "a"}, "line 1 is not a document"),
    ],
)
def test_a_wrong_line_of_drop_documents_is_named(tmp_path, line, problem):
    write(tmp_path / "a.jsonl", [record(1)])
    write(tmp_path / "listed.jsonl", [line])
    with pytest.raises(DataError, match=problem):
        curate(config(tmp_path, drop_documents=str(tmp_path / "listed.jsonl")))


def test_groups_stay_together_over_all_sources(tmp_path):
    write(tmp_path / "a.jsonl", [record(i, group=f"g{i % 10}") for i in range(60)])
    write(tmp_path / "b.jsonl", [record(i, SENTENCE.format(f"b{i}"), group=f"g{i % 10}") for i in range(60)])
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl"), "id_field": "id"} for name in "ab"}
    curate(config(tmp_path, sources=sources))
    sides = {
        split: {row["group"] for source in "ab" for row in kept(tmp_path, source, split)}
        for split in ("train", "heldout")
    }
    assert sides["train"]
    assert sides["heldout"]
    assert not sides["train"] & sides["heldout"]


def test_equal_documents_first_by_source_and_row_stays(tmp_path):
    train = group_on("train")
    text = SENTENCE.format("same")
    write(tmp_path / "z.jsonl", [record(1, text, train), record(2, SENTENCE.format(2), train)])
    write(
        tmp_path / "b.jsonl",
        [record(3, SENTENCE.format(3), train), record(4, text + "\n", train), record(5, text, train)],
    )
    # written in another order than by name: the keeper does not depend on it
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl"), "id_field": "id"} for name in "zb"}
    curate(config(tmp_path, sources=sources))
    assert [row["id"] for row in kept(tmp_path, "b", "train")] == ["d3", "d4"]
    assert [row["id"] for row in kept(tmp_path, "z", "train")] == ["d2"]
    (dropped,) = drops(tmp_path, "z")
    assert (dropped["rule"], dropped["reason"], dropped["score"]) == ("dedup/exact", "equal to b/d4", 1.0)


@pytest.mark.parametrize("dedup", ["exact", "none"])
def test_a_training_document_equal_to_a_heldout_one_is_dropped(tmp_path, dedup):
    train, heldout = group_on("train"), group_on("heldout")
    text = SENTENCE.format("same")
    records = [record(1, text, train), record(2, text, heldout), record(3, SENTENCE.format(3), train)]
    records += [record(4, SENTENCE.format(3), train)]
    write(tmp_path / "a.jsonl", records)
    curate(config(tmp_path, dedup=dedup))
    assert [row["id"] for row in kept(tmp_path, "a", "heldout")] == ["d2"]
    gone = {row["id"]: (row["rule"], row["split"], row["reason"]) for row in drops(tmp_path, "a")}
    assert gone.pop("d1") == ("dedup/heldout", "train", "equal to the held-out document a/d2")
    assert gone == ({"d4": ("dedup/exact", "train", "equal to a/d3")} if dedup == "exact" else {})


def test_rerun_is_identical_to_the_byte_and_a_changed_config_leaves_nothing_behind(tmp_path):
    write(tmp_path / "a.jsonl", [record(i, SENTENCE.format(i % 30)) for i in range(50)])
    write(tmp_path / "b.jsonl", [record(i, SENTENCE.format(f"b{i}")) for i in range(20)])
    both = {name: {"path": str(tmp_path / f"{name}.jsonl"), "id_field": "id"} for name in "ab"}
    curate(config(tmp_path, sources=both))
    first = everything(tmp_path / "out")
    curate(config(tmp_path, sources=both))
    assert everything(tmp_path / "out") == first
    curate(config(tmp_path))
    names = set(everything(tmp_path / "out"))
    assert names == {
        "documents/a/train.parquet", "documents/a/heldout.parquet", "drops/a.parquet", "report.json", "report.md"
    }  # fmt: skip


def test_a_failed_rerun_leaves_the_old_result(tmp_path):
    write(tmp_path / "a.jsonl", [record(i) for i in range(20)])
    curate(config(tmp_path))
    first = everything(tmp_path / "out")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": \n')
    with pytest.raises(DataError, match=r"a\.jsonl:21"):
        curate(config(tmp_path))
    assert everything(tmp_path / "out") == first


def test_unreadable_records_can_be_dropped(tmp_path):
    write(tmp_path / "a.jsonl", [record(i) for i in range(5)])
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": \n')
    report = curate(config(tmp_path, unreadable="drop"))
    (dropped,) = drops(tmp_path, "a")
    assert dropped["rule"] == "read/unreadable"
    assert "a.jsonl:6" in dropped["reason"]
    assert dropped["score"] is None
    assert report.kept_documents == 5


def test_text_stays_as_it_is_without_normalisation(tmp_path):
    raw = SENTENCE.format(1) + " \r\n\r\n"
    write(tmp_path / "a.jsonl", [record(1, raw, group_on("train"))])
    curate(config(tmp_path, normalize=False))
    assert kept(tmp_path, "a", "train")[0]["text"] == raw


def test_repeated_ids_are_noted(tmp_path):
    write(tmp_path / "a.jsonl", [record(1), record(1, SENTENCE.format("other")), record(2)])
    report = curate(config(tmp_path))
    assert report.repeated_ids == {"a": 1}
    assert any("id_field" in note for note in report.notes())


def test_a_source_of_which_nothing_is_left_is_noted_with_the_rule(tmp_path):
    write(tmp_path / "a.jsonl", [record(i, group=group_on("train")) for i in range(3)])
    write(tmp_path / "b.jsonl", [record(i, "Too short.") for i in range(3)])
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl"), "id_field": "id"} for name in ("a", "b")}
    report = curate(config(tmp_path, sources=sources))
    line = "b: no document of 3 is left; 'prose-light/words' dropped most: 3"
    assert report.notes()[0] == line
    assert line in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", " \n\n"), ("a.jsonl", "")])
def test_the_error_for_an_empty_file_names_it(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="no document is left") as caught:
        curate(config(tmp_path, sources={"a": {"path": str(tmp_path / name)}}, group_field=None))
    assert name in caught.value.message
    assert "empty" in str(caught.value)
    assert "rules" not in str(caught.value.hint)


def long_text(n: int) -> str:
    return "\n\n".join(f"{SENTENCE.format(i)} {SENTENCE.format(-i)}" for i in range(n))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "one line"])
def test_a_long_document_is_cut_into_parts_that_are_held_out_one_by_one(tmp_path, kind):
    text = long_text(400) if kind != "one line" else long_text(400).replace("\n\n", " ")
    name = "a.jsonl" if kind == "jsonl" else "a.txt"
    (tmp_path / name).write_text(text if kind != "jsonl" else json.dumps({"text": text}))
    changes = {"sources": {"a": {"path": str(tmp_path / name)}}, "group_field": None, "max_document_bytes": 2000}
    report = curate(config(tmp_path, **changes))
    rows = kept(tmp_path, "a", "train") + kept(tmp_path, "a", "heldout")
    rows.sort(key=lambda row: int(row["id"].partition("#")[2]))
    base = name if kind != "jsonl" else "a.jsonl:1"
    assert [row["id"] for row in rows] == [f"{base}#{n}" for n in range(1, len(rows) + 1)]
    assert (" " if kind == "one line" else "\n\n").join(row["text"].strip() for row in rows) == text
    assert max(row["n_bytes"] for row in rows) <= 2000
    assert report.sources["a"]["heldout"].kept.documents > 5
    assert report.notes()[0].startswith(f"a: cut 1 document longer than max_document_bytes into {len(rows)} parts")


def test_parts_of_a_group_stay_on_one_side(tmp_path):
    write(tmp_path / "a.jsonl", [record(1, long_text(100), group_on("heldout")), record(2, group=group_on("train"))])
    report = curate(config(tmp_path, max_document_bytes=2000))
    assert {row["id"] for row in kept(tmp_path, "a", "train")} == {"d2"}
    assert report.sources["a"]["heldout"].kept.documents > 5


def test_a_source_without_held_out_documents_is_noted_with_what_helps(tmp_path):
    """What the note proposes is then done: it holds some out."""
    (tmp_path / "a.txt").write_text(long_text(600))
    plain = {"sources": {"a": {"path": str(tmp_path / "a.txt")}}, "group_field": None, "heldout_frac": 0.05, "seed": 1}
    (note,) = curate(config(tmp_path, **plain)).notes()
    assert note.startswith("a: no document of 1 is held out, at heldout_frac=0.05: a recipe cannot name it")
    found = re.search(r"max_document_bytes=(\d+) cuts", note)
    report = curate(config(tmp_path, **plain, max_document_bytes=int(found[1])))
    assert report.sources["a"]["heldout"].kept.documents > 0
    write(tmp_path / "b.jsonl", [record(i) for i in range(20)])
    plain["sources"] = {"b": {"path": str(tmp_path / "b.jsonl")}}
    for seed in range(100):
        notes = curate(config(tmp_path, **{**plain, "seed": seed})).notes()
        if notes:
            break
    assert notes == [
        "b: no document of 20 is held out, at heldout_frac=0.05: a recipe cannot name it under data.heldout; "
        "heldout_frac=0.15 holds more out"
    ]
    plain["sources"] = {"c": {"path": str(tmp_path / "c.txt")}}
    (tmp_path / "c.txt").write_text(SENTENCE)
    assert curate(config(tmp_path, **plain)).notes()[0].endswith("; give it more documents")
    assert curate(config(tmp_path, **{**plain, "heldout_frac": 0})).notes() == []


def test_empty_corpus_and_nothing_left(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no document is left: the sources are empty"):
        curate(config(tmp_path))
    write(tmp_path / "a.jsonl", [record(i, "Too short.") for i in range(3)])
    with pytest.raises(DataError, match=r"no document is left: prose-light/words"):
        curate(config(tmp_path))
    assert not (tmp_path / "out" / "report.json").exists()


def test_the_output_cannot_be_inside_a_source(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(SENTENCE)
    for output in (tmp_path / "docs" / "out", tmp_path / "docs", tmp_path):
        with pytest.raises(UserError, match="one folder contains the other"):
            curate(
                config(tmp_path, sources={"a": {"path": str(tmp_path / "docs")}}, output=str(output), group_field=None)
            )


def test_missing_group_field_is_named(tmp_path):
    write(tmp_path / "a.jsonl", [{"id": "x", "text": SENTENCE}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: there is no field 'group'; fields: id, text"):
        curate(config(tmp_path))


@pytest.mark.slow
def test_numeric_fields_are_kept_for_dedup_and_do_not_hinder_tokenize(tmp_path):
    values = [0.5, 2, None, -1e300]
    write(tmp_path / "a.jsonl", [{**record(i, group=group_on("train", i)), "q": q} for i, q in enumerate(values)])
    curate(config(tmp_path, sources={"a": {"path": str(tmp_path / "a.jsonl"), "id_field": "id", "keep_fields": ["q"]}}))
    table = pq.read_table(tmp_path / "out/documents/a/train.parquet")
    assert dict(zip(table.column("id").to_pylist(), table.column("q").to_pylist(), strict=True)) == {
        f"d{i}": None if q is None else float(q) for i, q in enumerate(values)
    }
    assert set(kept(tmp_path, "a", "train")[0]) == {"id", "text", "group", "n_bytes"}
    text = " ".join(f"w{i}" for i in range(60))
    near = [{"id": name, "text": text + end, "q": q} for name, end, q in (("a", "", 1), ("b", " x", 3), ("c", " y", 2))]
    write(tmp_path / "a.jsonl", [{**one, "group": group_on("train")} for one in near])
    curate(config(tmp_path, sources={"a": {"path": str(tmp_path / "a.jsonl"), "id_field": "id", "keep_fields": ["q"]}}))
    output = tmp_path / "unique"
    dedup(DedupConfig(documents=str(tmp_path / "out"), output=str(output), score_field="q"))
    assert pq.read_table(output / "documents/a/train.parquet").column("id").to_pylist() == ["b"]


@pytest.mark.parametrize(
    ("value", "message"),
    [("high", "'q' holds str, not a number"), (True, "holds bool"), (10**400, "too large"), (..., "no field 'q'")],
)
def test_a_kept_field_holds_numbers(tmp_path, value, message):
    write(tmp_path / "a.jsonl", [record(0) | ({} if value is ... else {"q": value})])
    with pytest.raises(DataError, match=message):
        curate(config(tmp_path, sources={"a": {"path": str(tmp_path / "a.jsonl"), "keep_fields": ["q"]}}))
    write(tmp_path / "b.txt", [record(0)])
    with pytest.raises(DataError, match="a file of text has no field 'q'"):
        curate(
            config(tmp_path, sources={"a": {"path": str(tmp_path / "b.txt"), "keep_fields": ["q"]}}, group_field=None)
        )


def test_progress_is_reported(tmp_path):
    write(tmp_path / "a.jsonl", [record(i) for i in range(20)])
    told = []
    curate(config(tmp_path), lambda *one: told.append(one[:3]))
    assert {what for what, _, _ in told} == {"reading", "writing"}
    assert all(0 <= done <= total for _, done, total in told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {"a/b": {"path": "x"}}}, "cannot name a folder"),
        ({"sources": {"tokenizer": {"path": "x"}}}, "cannot name a folder"),
        ({"sources": {"a": {"path": "x", "rules": ["none", "c4-2019"]}}}, "'none' cannot be combined with others"),
        ({"sources": {"a": {"path": "x", "rules": ["c4-2019", "c4-2019"]}}}, "twice"),
        ({"sources": {"a": {"path": "x", "rules": []}}}, r"\[none\] for none"),
        ({"sources": {"a": {"path": "x", "keep_fields": ["text"]}}}, "a column of every document already"),
        ({"sources": {"a": {"path": "x", "keep_fields": ["q", "q"]}}}, "names a field twice"),
        ({"heldout_frac": 0.5}, "less than 0.5"),
    ],
)
def test_config_is_checked(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)
