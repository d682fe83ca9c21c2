"""``smalti eval read`` as it is typed: samples, orders, flags, import, and what is refused."""

import io
import json
from pathlib import Path

import pytest
from reading_samples import example

from smalti.cli.main import run as smalti


@pytest.fixture
def run(tmp_path: Path) -> str:
    example(tmp_path / "one")
    return str(tmp_path / "one")


def test_samples_and_scores_are_printed(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "read", run, "--limit", "1"]) == 0
    out = capsys.readouterr().out
    for text in ("one, step 5:", "colours accuracy 0.333 0.192 to 0.512 30", "1 of 55", "--limit N"):
        assert text in " ".join(out.split()), text
    assert "  > 0.690   blue  <- answer" in out.replace("blue", " blue")
    assert "before" not in out
    assert smalti(["eval", "read", run, "--task", "numbers", "--sort", "index"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[31m4\\u202e" in out
    assert not set(out) & {"\x1b", "\u202e"}
    assert "numbers:q3  WRONG, unparsed, truncated" in out
    assert smalti(["eval", "read", run, "--task", "heldout/prose", "--limit", "1"]) == 0
    assert "heldout/prose:4  1.702 bits per byte of 100 bytes\n  | Document 4" in capsys.readouterr().out


def test_a_flag_changes_the_score_and_is_written(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--flag", "colours:1=label-wrong", "--flag", "numbers:q5=answer-acceptable", "--note", "six"]
    assert smalti(["eval", "read", run, *flags]) == 0
    out = capsys.readouterr().out
    assert "2 lines added to" in out
    assert "0.333 0.192 to 0.512 30 0.345 0.199 to 0.527 29 1 excluded" in " ".join(out.split())
    assert "Question" not in out
    path = Path(run, "evals/flags.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["task"], line["flag"], line["note"]) for line in lines] == [
        ("colours", "label-wrong", "six"),
        ("numbers", "answer-acceptable", "six"),
    ]
    assert (lines[0]["index"], lines[1]["id"], lines[1]["answer"]) == (1, "q5", "six")
    assert smalti(["eval", "read", run, "--json", "--limit", "3", "--flag", "colours:1=none"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["flags"]["applied"], len(values["samples"]), values["n"]) == (1, 3, 55)
    assert len(path.read_text().splitlines()) == 3
    assert values["samples"][0]["probabilities"] == [0.155, 0.155, 0.69]


def test_flags_of_the_page_are_imported_from_stdin(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert smalti(["eval", "read", run, "--flags", str(tmp_path / "mine.jsonl"), "--flag", "colours:1=ambiguous"]) == 0
    for added in (1, 0):
        monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "mine.jsonl").read_text()))
        assert smalti(["eval", "read", run, "--import", "-"]) == 0
        assert f"{added} line{'' if added == 1 else 's'} added to {run}/evals/flags.jsonl" in capsys.readouterr().out


def test_two_models_are_read_side_by_side(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example(tmp_path / "two", shift=1)
    both = [run, "--other", str(tmp_path / "two")]
    assert smalti(["eval", "read", *both, "--limit", "2", "--task", "colours"]) == 0
    out = capsys.readouterr().out
    assert "answered differently: 2 of 30" in out
    assert "<- one, step 5" in out
    assert "two, step 5  colours  accuracy" in out
    assert smalti(["eval", "read", *both, "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 30_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "disagreement"], "--other RUN"),
        (["--note", "x"], "--note has no effect without --flag"),
        (["--flag", "colours=ambiguous"], "there is no item 'colours'"),
        (["--task", "shapes"], "has no samples of the task 'shapes'"),
        (["--import", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_is_refused(run: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "read", run, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path(run, "evals/flags.jsonl").exists()
