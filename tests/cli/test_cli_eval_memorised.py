"""``smalti eval memorised`` as it is typed: a run, its export, another model, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import TEXTS, tiny_run, write_tokens

from smalti.cli.main import run as smalti
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.distributed.checkpoint.export import export

SHORT = ["--windows", "8", "--prompt-tokens", "6", "--new-tokens", "3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("memorised"))
    export(run)
    return run


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert smalti(["eval", "memorised", *arguments, *SHORT, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_prints_a_table_and_keeps_the_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "memorised", str(run), *SHORT]) == 0
    out = capsys.readouterr().out
    for text in (
        "windows of 6 + 3 tokens",
        "train",
        "heldout",
        "occurrences",
        "epochs read by step 20: code ",
        "samples",
    ):
        assert text in out, text
    stored = json.loads(next(run.glob("evals/memorised/*/results.json")).read_text())
    assert (stored["model"], stored["step"], stored["seq_len"]) == ("tiny", 20, 9)
    assert stored["tasks"]["train"]["n"] == 8
    assert stored["epochs"]["code"] == pytest.approx(20 * 64 / stored["train_tokens"])
    assert "Suite `memorised`" in (run / "export/README.md").read_text()
    assert smalti(["eval", "read", str(run), "--sort", "index", "--limit", "1"]) == 0
    assert '"matched_tokens": ' in capsys.readouterr().out


def test_the_export_names_its_run_and_paths_replace_its_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = run.parents[1] / "data/code"
    first = measured(capsys, str(run / "export"))
    assert first["folder"].startswith(str(run))
    monkeypatch.chdir(code)
    output = ["--output", str(tmp_path / "out")]
    typed = measured(capsys, str(run), "--train", "train", "--heldout", "heldout", "--no-count", *output)
    assert typed["folder"].startswith(str(tmp_path / "out"))
    assert typed["epochs"] == {}
    assert typed["tasks"]["train"]["value"] == first["tasks"]["train"]["value"]
    assert "by_occurrences" not in typed["tasks"]["train"]
    (tmp_path / "new.jsonl").write_text(json.dumps({"text": TEXTS[2]}))
    assert measured(capsys, str(run), "--train", str(tmp_path / "new.jsonl"))["tasks"]["heldout"]["n"] == 8


def test_less_is_better_in_comparisons(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {name: measured(capsys, str(run), "--output", str(tmp_path / name)) for name in "ab"}
    for name, score in (("a", 1.0), ("b", 0.0)):
        path = Path(results[name]["folder"]) / "samples.jsonl"
        lines = [json.loads(line) | {"score": score} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert smalti(["eval", "compare", *(results[name]["folder"] for name in "ab"), "--task", "train", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"].values()
    assert (row["metric"], row["difference"], row["verdict"]) == ("extractable_frac", -1.0, "B better")


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "export", tmp_path / "model")
    tokenizer = Tokenizer(train_bpe(["quite another text " * 5], 270), "<|endoftext|>")
    write_tokens(tmp_path / "other", tokenizer, TEXTS)
    for arguments, message in (
        ([str(tmp_path / "model"), *SHORT], "is not of a run"),
        ([str(run), "--prompt-tokens", "90", "--new-tokens", "7"], "has 97 tokens, and the model takes 96"),
        ([str(run), "--prompt-tokens", "80", "--new-tokens", "9"], "has 89 tokens"),
        ([str(run), "--train", str(tmp_path / "other"), *SHORT], "of another tokenizer than the model's"),
        ([str(run), "--train", str(tmp_path / "none"), *SHORT], "none"),
        ([str(run), "--output", "/proc/x"], "--output /proc/x cannot be made"),
    ):
        assert smalti(["eval", "memorised", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err
