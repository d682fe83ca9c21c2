"""``smalti data`` as a command: the demo's chain on a small library, JSON for programs, errors in three lines."""

import pytest
from cli_in_process import json_of
from synthetic_library import synthetic_library

from smalti.base.errors import UserError
from smalti.cli.main import run
from smalti.config.curate import CurateConfig, TokenizeConfig
from smalti.config.dedup import DedupConfig
from smalti.config.load import load


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder with a small standard library."""
    monkeypatch.chdir(tmp_path)
    synthetic_library(tmp_path / "lib", monkeypatch)
    return tmp_path


@pytest.mark.slow
def test_the_demo_chain(place, capsys):
    assert run(["data", "documents", "data/demo/raw"]) == 0
    assert "data/demo/raw/code.jsonl" in capsys.readouterr().out
    assert run(["data", "curate", "demo-curate", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (place / "data" / "demo" / "curated").exists()
    assert run(["data", "curate", "demo-curate", "heldout_frac=0.2"]) == 0
    out = capsys.readouterr().out
    assert "code    train" in out
    assert "smalti data tokenize" in out
    assert run(["data", "dedup", "demo-dedup"]) == 0
    assert "self-test: recall" in capsys.readouterr().out
    assert run(["data", "tokenize", "demo-tokenize", "vocab_size=300"]) == 0
    assert "vocabulary of 300" in capsys.readouterr().out
    assert run(["data", "inspect", "data/demo/tokens/code/train", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "document length in tokens" in out
    assert "   | import os" in out
    assert "####" in out


@pytest.mark.slow
def test_json_everywhere(place, capsys):
    assert run(["data", "documents", "raw", "--json"]) == 0
    assert json_of(capsys)["documents"] == {"code": 30, "prose": 30}
    sources = ["sources.code.path=raw/code.jsonl", "sources.prose.path=raw/prose.jsonl", "output=curated"]
    assert run(["data", "curate", "demo-curate", *sources, "--dry-run", "--json"]) == 0
    assert json_of(capsys)["files"] == {"code": ["raw/code.jsonl"], "prose": ["raw/prose.jsonl"]}
    assert run(["data", "curate", "demo-curate", *sources, "--json"]) == 0
    assert set(json_of(capsys)["sources"]) == {"code", "prose"}
    assert (
        run(["data", "tokenize", "demo-tokenize", "documents=curated", "output=tokens", "vocab_size=300", "--json"])
        == 0
    )
    assert json_of(capsys)["tokenizer"]["vocab_size"] == 300
    assert run(["data", "inspect", "tokens", "--json"]) == 0
    assert json_of(capsys)["kind"] == "tokenized"
    assert run(["data", "inspect", "curated", "--json"]) == 0
    assert json_of(capsys)["kind"] == "documents"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curate", "demo-curate"], "data/demo/raw/code.jsonl does not exist"),
        (["curate", "curate.yaml"], "hint: 'smalti config show demo-curate' prints an example"),
        (["curate", "demo-curate", "sources.code.rules=[code-lihgt]"], "code-light"),
        (["curate", "demo-curate", "heldout_fraction=0.1"], "heldout_frac"),
        (["tokenize", "demo-tokenize"], "smalti data curate"),
        (["inspect", "nowhere"], "there is no folder 'nowhere'\nhint: check the path"),
        (["inspect", "lbi"], "there is no folder 'lbi'\nhint: did you mean 'lib'?"),
        (["inspect", "no/where"], "there is no folder 'no/where'\nhint: check the path"),
        (["documents", "raw", "--evrything"], "--everything"),
    ],
)
def test_errors_are_short_and_end_with_2(place, capsys, arguments, message):
    assert run(["data", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_broken_line_is_named(place, capsys):
    (place / "x.jsonl").write_text('{"text": "fine"}\n{"text":\n')
    (place / "c.yaml").write_text("sources:\n  x: {path: x.jsonl}\noutput: out\n")
    assert run(["data", "curate", "c.yaml"]) == 2
    assert "x.jsonl:2: this line is not valid JSON" in capsys.readouterr().err


def test_the_recipes_of_the_demo_load_and_fit_together():
    curated = load(CurateConfig, "demo-curate").config
    unique = load(DedupConfig, "demo-dedup").config
    tokens = load(TokenizeConfig, "demo-tokenize").config
    assert unique.documents == curated.output
    assert tokens.documents == unique.output
    assert tokens.vocab_size == 4096
    loaded = ["tokenizer=models/some-llama", "output=data/other"]
    assert load(TokenizeConfig, "demo-tokenize", loaded).config.tokenizer == "models/some-llama"
    with pytest.raises(UserError, match="hint: leave 'vocab_size' out of the recipe"):
        load(TokenizeConfig, "demo-tokenize", [*loaded, "vocab_size=300"])
    assert list(curated.sources) == ["code", "prose"]
