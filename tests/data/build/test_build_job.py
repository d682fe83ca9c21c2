"""The whole build: what is planted is found, everything adds up, a second run does nothing, a kill changes nothing."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted_documents import LANGUAGES, edited, prose

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.build import BuildConfig
from smalti.config.curate import TokenizeConfig
from smalti.data.build.job import build, work_folder
from smalti.data.prepare.tokenize import tokenize


def config(folder: Path, **changes) -> BuildConfig:
    plain = {"name": "test", "inputs": str(folder / "in"), "output": str(folder / "out"), "workers": 1, "html": "tags"}
    return BuildConfig.model_validate({**plain, **changes})


def rows(folder: Path, kind: str) -> dict[str, dict]:
    """The documents or drops of an output, by id."""
    tables = [pq.read_table(path).to_pylist() for path in sorted((folder / kind).rglob("*.parquet"))]
    return {row["id"]: row for table in tables for row in table}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_jsonl(path: Path, texts: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))


def write_broken(folder: Path) -> dict[str, str]:
    """Files that cannot be read; returns the id of each drop and its rule."""
    folder.mkdir(parents=True)
    rng = random.Random(5)
    (folder / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * 3_000_000))
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"a" * 3_000_000))
    (folder / "large.txt").write_bytes(b"words " * 500_000)
    (folder / "truncated.txt.gz").write_bytes(gzip.compress(rng.randbytes(4000))[:-500])
    (folder / "broken.parquet").write_bytes(b"PAR1 is not enough")
    (folder / "binary.txt").write_bytes(rng.randbytes(4000))
    (folder / "broken.jsonl").write_text('{"text": "x\n{"nothing": 1}\n[]\n')
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt")).write_text("a name that is not UTF-8")
    return {
        "bomb.txt.gz": "extract/too-large",
        "bomb.jsonl.gz": "extract/too-large",
        "large.txt": "extract/too-large",
        "truncated.txt.gz": "extract/file",
        "broken.parquet": "extract/file",
        "binary.txt": "extract/encoding",
        "broken.jsonl:1": "extract/record",
        "broken.jsonl:2": "extract/record",
        "broken.jsonl:3": "extract/record",
    }


def test_what_is_planted_is_found_and_nothing_else_goes(tmp_path):
    rng = random.Random(7)
    plain = {f"{language}-{i}": prose(rng, language, 10) for language in LANGUAGES for i in range(60)}
    wanted = ("en", "de", "fr", "es", "ja")
    english = [name for name in plain if name.startswith("en-")]
    question = prose(rng, n_sentences=4)
    planted = {
        "exact": {f"exact-{i}": plain[english[i]] for i in range(20)},
        "near": {f"near-{i}": edited(rng, plain[english[20 + i]]) for i in range(20)},
        "decontaminate": {f"leak-{i}": f"{prose(rng)} {question} {prose(rng)}" for i in range(10)},
        "safe": {f"spam-{i}": f"{prose(rng, n_sentences=2)} {'buy cheap pills now ' * 40}" for i in range(10)},
    }
    pages = {f"page-{i}": prose(rng, n_sentences=6) for i in range(5)}
    write_jsonl(tmp_path / "in" / "a.jsonl", plain)
    for number, texts in enumerate(planted.values()):
        write_jsonl(tmp_path / "in" / f"b{number}.jsonl", texts)
    (tmp_path / "in" / "web").mkdir()
    for name, text in pages.items():
        page = f"<html><script>var x;</script><body><nav>Home</nav><p>{text}</p></body></html>"
        (tmp_path / "in" / "web" / f"{name}.html").write_text(page)
    odd = 'a\nb "c" \u202e%s;$(x).txt'
    (tmp_path / "in" / odd).write_text(prose(rng) + " Write to jane.doe@example.org, please.")
    write_jsonl(tmp_path / "eval.jsonl", {"q1": question})
    broken = write_broken(tmp_path / "in" / "broken")

    report = build(
        config(
            tmp_path, languages=wanted, decontaminate=str(tmp_path / "eval.jsonl"), max_file_bytes=1_000_000,
            max_expansion=10,
        )
    )  # fmt: skip
    documents, drops = rows(tmp_path / "out", "documents"), rows(tmp_path / "out", "drops")
    assert len(drops) == sum(step["dropped"] for step in report.values["build"]["steps"])
    assert {name: drops.pop(f"broken/{name}")["rule"] for name in broken} == broken
    assert [row["rule"] for name, row in drops.items() if "xff" in name] == ["extract/name"]
    drops = {name: row for name, row in drops.items() if "xff" not in name}
    assert all(row["reason"] and row["source"] == "in" for row in drops.values())
    # Languages: recall and precision 1 on ten sentences.
    assert {name for name, row in drops.items() if row["rule"] == "language"} == {n for n in plain if n[:2] == "ru"}
    pairs = {"exact": 20, "near": 20}
    for kind, expected in pairs.items():
        rule = {"exact": "dedup/exact", "near": "dedup/near"}[kind]
        found = {name for name, row in drops.items() if row["rule"] == rule}
        twins = {name for i in range(expected) for name in (f"{kind}-{i}", english[i + 20 * (kind == "near")])}
        assert len(found) == expected
        assert found <= twins
    for kind in ("decontaminate", "safe"):
        assert {n for n, row in drops.items() if row["rule"].partition("/")[0] == kind} == set(planted[kind])
    assert len(drops) == 60 + 20 + 20 + 10 + 10
    # What stays is unchanged, but for markup and personal data.
    assert all(documents[name]["text"] == text for name, text in plain.items() if name in documents)
    assert [documents[f"web/{name}.html"]["text"] for name in pages] == list(pages.values())
    assert documents[odd]["text"].endswith("Write to [EMAIL], please.")
    assert set(documents["ja-1"]) >= {"id", "text", "source"}
    assert documents["ja-1"]["language"] == "ja"
    assert "safe/repetitive-frac" in (tmp_path / "out" / "report.md").read_text()


def test_a_second_run_does_nothing_and_a_change_only_what_changed(tmp_path):
    rng = random.Random(1)
    write_jsonl(tmp_path / "in" / "a.jsonl", {f"a{i}": prose(rng) for i in range(30)})
    assert build(config(tmp_path)).is_new
    before = everything(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = build(config(tmp_path))
    assert not again.is_new
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert not list((tmp_path / "out").glob(".*"))
    # Another limit reuses the extracted and annotated shards.
    shards = {path: path.stat().st_mtime_ns for path in work_folder(config(tmp_path)).rglob("*.parquet")}
    assert len(shards) == 2
    assert build(config(tmp_path, languages=["de"], dedup="exact", heldout_frac=0.0, inputs=[
        {"path": str(tmp_path / "in")}, {"path": german(tmp_path, rng), "name": "more"}
    ])).is_new  # fmt: skip
    left = {path: path.stat().st_mtime_ns for path in work_folder(config(tmp_path)).rglob("*.parquet")}
    assert shards.items() <= left.items()
    # The same recipe as at first gives the same bytes.
    assert build(config(tmp_path)).is_new
    assert everything(tmp_path / "out") == before


def german(folder: Path, rng: random.Random) -> str:
    write_jsonl(folder / "more" / "g.jsonl", {f"g{i}": prose(rng, "de") for i in range(5)})
    return str(folder / "more")


def test_a_file_that_changes_after_it_was_hashed_is_an_error_and_not_stored(tmp_path):
    rng = random.Random(9)
    path = tmp_path / "in" / "a.jsonl"
    write_jsonl(path, {"a": prose(rng)})

    def changes(what, done, total, *_):
        if what == "extracting" and not done:
            write_jsonl(path, {"b": prose(rng)})

    with pytest.raises(RetryableError, match="changed while it was read"):
        build(config(tmp_path), changes)
    assert not list(work_folder(config(tmp_path)).rglob("*.parquet"))
    build(config(tmp_path))
    assert set(rows(tmp_path / "out", "documents")) == {"b"}


def test_an_output_that_lost_a_file_is_built_again(tmp_path):
    write_jsonl(tmp_path / "in" / "a.jsonl", {f"a{i}": prose(random.Random(i)) for i in range(5)})
    build(config(tmp_path))
    before = everything(tmp_path / "out")
    (tmp_path / "out" / "documents" / "in" / "train.parquet").unlink()
    assert build(config(tmp_path)).is_new
    assert everything(tmp_path / "out") == before


def test_added_documents_are_compared_with_those_that_are_there(tmp_path):
    rng = random.Random(2)
    write_jsonl(tmp_path / "in" / "a.jsonl", {f"a{i}": prose(rng) for i in range(10)})
    build(config(tmp_path))
    text = rows(tmp_path / "out", "documents")["a3"]["text"]
    write_jsonl(tmp_path / "in" / "z.jsonl", {"new": prose(rng), "copy": text})
    build(config(tmp_path))
    assert set(rows(tmp_path / "out", "drops")) == {"copy"}
    assert "new" in rows(tmp_path / "out", "documents")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("replace", "Mail [EMAIL] soon."), ("mark", "Mail a.b@example.org soon."), ("keep", "Mail a.b@example.org soon.")],
)
def test_what_is_done_with_personal_data(tmp_path, mode, expected):
    text = f"Mail a.b@example.org soon. {prose(random.Random(4))}"
    write_jsonl(tmp_path / "in" / "a.jsonl", {"d": text})
    build(config(tmp_path, pii=mode, dedup="none"))
    row = rows(tmp_path / "out", "documents")["d"]
    assert row["text"].startswith(expected)
    assert row.get("pii") == ('[[5, 20, "email"]]' if mode == "mark" else None)


def test_personal_data_can_drop_a_document(tmp_path):
    texts = {"d": f"Mail a.b@example.org. {prose(random.Random(4))}", "e": prose(random.Random(5))}
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    build(config(tmp_path, pii="drop", dedup="none"))
    assert {name: row["rule"] for name, row in rows(tmp_path / "out", "drops").items()} == {"d": "pii"}


def test_code_keeps_its_markup_and_has_no_language(tmp_path):
    (tmp_path / "in").mkdir()
    code = "\n".join(f'def render_{i}(value):\n    return "<div>{i}" + str(value) + "</div>"\n' for i in range(8))
    (tmp_path / "in" / "a.py").write_text(code)
    build(config(tmp_path, languages=["en"], dedup="none"))
    row = rows(tmp_path / "out", "documents")["a.py"]
    assert (row["text"], row["language"]) == (code.strip(), "code")


def test_published_presets_leave_out_what_means_nothing_for_the_language(tmp_path):
    rng = random.Random(6)
    write_jsonl(tmp_path / "in" / "a.jsonl", {name: prose(rng, name, 30) for name in ("en", "de", "ja")})
    inputs = [{"path": str(tmp_path / "in"), "rules": ["gopher-2021", "safe"]}]
    build(config(tmp_path, inputs=inputs, dedup="none"))
    assert set(rows(tmp_path / "out", "documents")) == {"en", "de", "ja"}


def test_parquet_and_compressed_inputs(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [prose(random.Random(i)) for i in range(3)]
    pq.write_table(pa.table({"id": [5], "text": texts[:1]}), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "b.md.gz").write_bytes(gzip.compress(texts[1].encode()))
    with pa.CompressedOutputStream(str(tmp_path / "in" / "c.jsonl.zst"), "zstd") as file:
        file.write(json.dumps({"text": texts[2]}).encode())
    build(config(tmp_path))
    documents = rows(tmp_path / "out", "documents")
    assert {name: row["text"] for name, row in documents.items()} == dict(
        zip(["5", "b.md.gz", "c.jsonl.zst:1"], texts, strict=True)
    )


def test_the_output_can_be_tokenized(tmp_path):
    rng = random.Random(8)
    write_jsonl(tmp_path / "in" / "a.jsonl", {f"a{i}": prose(rng) for i in range(60)})
    build(config(tmp_path, heldout_frac=0.2))
    tokenize(TokenizeConfig(documents=str(tmp_path / "out"), output=str(tmp_path / "tokens"), vocab_size=300))
    assert (tmp_path / "tokens" / "in" / "heldout" / "manifest.json").exists()


def test_errors_say_what_to_do(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("12345")
    with pytest.raises(DataError, match="no document is left: safe/letters 1"):
        build(config(tmp_path))
    assert not (tmp_path / "out" / "report.json").exists()
    with pytest.raises(UserError, match="overlap"):
        build(config(tmp_path, output=str(tmp_path / "in" / "out")))
    with pytest.raises(DataError, match="does not exist"):
        build(config(tmp_path, inputs=str(tmp_path / "nowhere")))
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "documents").mkdir()
    (tmp_path / "in" / "a.txt").write_text(prose(random.Random(1)))
    with pytest.raises(UserError, match="would be lost"):
        build(config(tmp_path))


def many_files(folder: Path) -> None:
    """Eight sources of a hundred and fifty documents, many of them equal."""
    rng = random.Random(9)
    texts = [prose(rng, rng.choice(LANGUAGES), 8) for _ in range(250)]
    for number in range(8):
        chosen = rng.choices(texts, k=150)
        write_jsonl(folder / f"source{number}" / "a.jsonl", {f"{number}-{i}": text for i, text in enumerate(chosen)})


def recipe(folder: Path, output: str, work: str, more: str = "") -> Path:
    inputs = ", ".join(str(path) for path in sorted((folder / "in").iterdir()))
    path = folder / f"{output}.yaml"
    path.write_text(f"name: kills\ninputs: [{inputs}]\noutput: {folder / output}\nwork: {folder / work}\n{more}")
    return path


CUTS = "dedup: exact\nsemantic: {keep: 0.8}\nrepeats: passages\nrepeat_words: 8\nheldout_frac: 0.1\n"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("more", ["", CUTS], ids=["near", "semantic-repeats"])
def test_workers_and_kills_at_random_moments_do_not_change_a_byte(tmp_path, proof, more):
    many_files(tmp_path / "in")
    command = [sys.executable, "-m", "smalti", "data", "build"]
    started = time.monotonic()
    subprocess.run([*command, recipe(tmp_path, "whole", "work-a", more), "workers=1"], check=True, capture_output=True)
    seconds = time.monotonic() - started
    moments = np.random.default_rng(3).uniform(0.2, 1.0, proof(short=2, full=20))
    killed = 0
    for number, moment in enumerate(moments):
        path = recipe(tmp_path, f"killed{number}", f"work{number}", more)
        process = subprocess.Popen([*command, path, "workers=2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * moment)
        killed += process.poll() is None
        process.kill()
        process.wait()
        subprocess.run([*command, path, "workers=2"], check=True, capture_output=True)
        assert everything(tmp_path / f"killed{number}") == everything(tmp_path / "whole")
    assert killed
    if more:
        report = json.loads((tmp_path / "whole" / "report.json").read_text())
        dropped = {step["step"]: step["dropped"] for step in report["build"]["steps"]}
        assert dropped["semantic"] > 10
        assert report["repeats"]["documents"] > 10
