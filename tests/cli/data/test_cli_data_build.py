"""``smalti data build`` as a command: a table for people, JSON for programs, a plan, errors with hints."""

import json
import random

import pyarrow.parquet as pq
import pytest
from cli_in_process import json_of
from planted_documents import prose

from smalti.cli.main import run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a recipe and twelve documents, of which two are equal and one is in German."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    rng = random.Random(1)
    for number in range(10):
        (tmp_path / "docs" / f"{number}.txt").write_text(prose(rng))
    (tmp_path / "docs" / "copy.txt").write_text((tmp_path / "docs" / "3.txt").read_text())
    (tmp_path / "docs" / "de.md").write_text(prose(rng, "de"))
    (tmp_path / "recipe.yaml").write_text("name: notes\ninputs: docs\noutput: out\nlanguages: [en]\n")
    return tmp_path


def test_a_build_and_its_second_run(place, capsys):
    assert run(["data", "build", "recipe.yaml", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (place / "out").exists()
    assert run(["data", "build", "recipe.yaml", "html=tags"]) == 0
    out = capsys.readouterr().out
    assert "docs    dedup/exact          1" in out
    assert "written to out" in out
    table = pq.read_table(place / "out" / "documents" / "docs" / "train.parquet")
    assert table.num_rows == 10
    assert {"id", "text", "source"} <= set(table.column_names)
    assert run(["data", "build", "recipe.yaml", "html=tags"]) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert run(["data", "build", "recipe.yaml", "html=tags", "languages=[]", "--json"]) == 0
    report = json_of(capsys)
    assert report["sources"]["docs"]["train"]["documents"] == {"in": 12, "kept": 11, "dropped": 1}
    assert json.loads((place / "out" / "report.json").read_text())["build"]["languages"] == {"de": 1, "en": 11}


def test_a_recipe_writes_the_tokens_too(place, capsys):
    build = ["data", "build", "recipe.yaml", "html=tags", "tokenize.output=tokens"]
    assert run([*build, "tokenize.vocab_size=300"]) == 0
    out = capsys.readouterr().out
    assert "bytes per token" in out
    assert "smalti data inspect tokens" in out
    record = (place / "tokens" / "tokens.json").read_bytes()
    (place / "tokenize.yaml").write_text("documents: out\noutput: tokens-2\nvocab_size: 300\n")
    assert run(["data", "tokenize", "tokenize.yaml"]) == 0
    assert json.loads(record)["sources"] == json.loads((place / "tokens-2" / "tokens.json").read_text())["sources"]
    capsys.readouterr()
    assert run([*build, "tokenize.vocab_size=300"]) == 0
    assert "bytes per token" not in capsys.readouterr().out
    for change in ("tokenize.vocab_size=320", "languages=[en, de]"):
        assert run([*build, "tokenize.vocab_size=300", change]) == 0
        assert "bytes per token" in capsys.readouterr().out
    assert run([*build, "tokenize.tokenizer=nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(["data", "build", "recipe.yaml", "tokenize.output=out/tokens"]) == 2
    assert "overlap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("langauges=[en]", "did you mean languages"),
        ("languages=[english]", "english"),
        ("inputs=[docs, docs]", "more than one of the inputs is named 'docs'"),
        ("inputs=nowhere", "nowhere does not exist"),
        ("near_threshold=2", "near_threshold"),
        ("name=a/b", "cannot name a folder"),
        ("output=docs/out", "overlap"),
    ],
)
def test_errors_are_for_the_one_who_wrote_the_recipe(place, capsys, change, message):
    assert run(["data", "build", "recipe.yaml", change]) == 2
    assert message in capsys.readouterr().err


def test_what_happened_to_a_document_and_between_two_builds(place, capsys):
    assert run(["data", "build", "recipe.yaml", "html=tags", "dedup=exact"]) == 0
    assert run(["data", "build", "recipe.yaml", "html=tags", "dedup=none", "output=all", "name=all"]) == 0
    capsys.readouterr()
    assert run(["data", "why", "copy.txt", "out"]) == 0
    out = capsys.readouterr().out
    assert "kept instead of 1  docs/3.txt (dedup/exact)" in out or "duplicate of  docs/3.txt (train, kept)" in out
    assert "safe/letters" in out
    assert run(["data", "why", "docs/de.md", "out", "--json"]) == 0
    assert json_of(capsys)[0]["rule"] == "language"
    assert run(["data", "why", "nothing", "out"]) == 2
    assert "hint:" in capsys.readouterr().err
    assert run(["data", "diff", "out", "all"]) == 0
    out = capsys.readouterr().out
    assert "added: dropped in A by" in out
    assert "deduplicate" in out
    assert run(["data", "diff", "out", "all", "--json"]) == 0
    assert json_of(capsys)["totals"]["added"]["documents"] == 1
