"""``smalti eval memorised`` as it is typed: a run, its export, another model, and what is refused."""

import json
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forked_command import fork_ranks
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


TRAINED = {
    "model": {
        "family": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    },
    "train": {
        "duration": "200step",
        "global_batch_tokens": 1024,
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": "0.1run", "decay": "0.3run"},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every": "1run"},
        "eval_every": "1run",
        "parallel": {"ranks": 1, "threads": 1, "device": "cpu"},
    },
}


@pytest.mark.slow
def test_a_passage_repeated_200_times_is_extractable_until_the_repeats_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains on the corpus before and after ``smalti data build``; only trained models can show the difference."""
    monkeypatch.chdir(tmp_path)
    fork_ranks(monkeypatch)
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 7))) for _ in range(400)]
    passage = " ".join(draw.choices(words, k=60))
    texts = [" ".join(draw.choices(words, k=60)) + "\n\n" + passage * (number < 200) for number in range(240)]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer, copies = "train", {}
    for name, steps in (("before", {"dedup": "none"}), ("after", {"repeats": "passages"})):
        pages = {"path": "pages.jsonl", "name": "pages", "rules": ["none"]}
        recipe = {"name": name, "inputs": [pages], "output": f"data/{name}", "workers": 1, **steps}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe))
        assert smalti(["data", "build", f"{name}.yaml"]) == 0
        recipe = {"documents": f"data/{name}", "output": f"tokens/{name}", "tokenizer": tokenizer}
        vocab = {"vocab_size": 320} if tokenizer == "train" else {}
        (tmp_path / "tokenize.yaml").write_text(json.dumps(recipe | vocab))
        assert smalti(["data", "tokenize", "tokenize.yaml"]) == 0
        built = pq.read_table(f"data/{name}/documents/pages/train.parquet")["text"].to_pylist()
        copies[name] = sum(text.count(passage) for text in built)
        tokenizer = "tokens/before/tokenizer"
        data = {
            "tokenizer": tokenizer,
            "sources": {"pages": f"tokens/{name}/pages/train"},
            "seq_len": 128,
            "stages": [{"weights": {"pages": 1}}],
        }
        (tmp_path / f"{name}-run.yaml").write_text(json.dumps({"name": name, "data": data, **TRAINED}))
        assert smalti(["train", f"{name}-run.yaml"]) == 0
        assert smalti(["export", f"runs/{name}"]) == 0
    assert copies == {"before": 200, "after": 1}
    capsys.readouterr()
    size = ["--windows", "200", "--prompt-tokens", "20", "--new-tokens", "20", "--train", "tokens/before/pages/train"]
    shares = {}
    for name in ("before", "after"):
        assert smalti(["eval", "memorised", f"runs/{name}", *size, "--json"]) == 0
        score = json.loads(capsys.readouterr().out)["tasks"]["train"]
        shares[name] = score["by_occurrences"]
    print({name: {key: (part["n"], part["value"]) for key, part in groups.items()} for name, groups in shares.items()})
    assert shares["before"]["100+"]["interval"][0] > 0.5
    assert shares["after"]["100+"]["interval"][1] < 0.2
    assert shares["before"]["1"]["interval"][1] < 0.3
