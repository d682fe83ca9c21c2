"""``smalti data compare`` as a command: half a set is garbage, two halves of one set, kill -9 and errors."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_in_process import json_of
from forked_command import fork_ranks
from planted_documents import prose

from smalti.cli.main import run

TINY = (
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "data.seq_len=32", "train.global_batch_tokens=512", "train.parallel={ranks: 1, device: cpu, threads: 1}",
    "train.optimizer.lr=1e-2", "train.precision.compute=fp32", "train.eval_tokens=4096",
)  # fmt: skip
OPTIONS = ("--tokens", "20k", "--yes")
FOLDER = Path("runs/compare-bad-good")


def built(name: str, texts: dict[str, str], heldout_frac: float = 0.1) -> None:
    Path(f"in-{name}").mkdir()
    rows = (json.dumps({"id": document, "text": text}) + "\n" for document, text in texts.items())
    Path(f"in-{name}", "a.jsonl").write_text("".join(rows))
    recipe = {"name": name, "inputs": [{"path": f"in-{name}", "name": "docs", "rules": ["none"]}], "output": name,
              "dedup": "none", "workers": 1, "heldout_frac": heldout_frac}  # fmt: skip
    Path(f"{name}.yaml").write_text(json.dumps(recipe))
    assert run(["data", "build", f"{name}.yaml"]) == 0


def garbage(rng: random.Random, n_bytes: int) -> str:
    return " ".join(f"{rng.getrandbits(40):x}" for _ in range(n_bytes // 10))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets ``good``, and ``bad``, in which half of the training documents are random digits."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(1)
    texts = {f"d{i}": prose(rng, n_sentences=10) for i in range(120)}
    built("good", texts)
    built("bad", {name: text if i % 2 else garbage(rng, len(text)) for i, (name, text) in enumerate(texts.items())})
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings are commands in this process, with forked ranks; returns the recipes that were trained."""
    fork_ranks(monkeypatch)
    trained: list[str] = []

    def run_child(command: list[str], *, stdout: int | None = None) -> int:
        trained.append(command[-1])
        return run(command[3:])

    monkeypatch.setattr("smalti.cli.children.run_child", run_child)
    return trained


@pytest.mark.slow  # six trainings
@pytest.mark.usefixtures("place")
def test_a_set_of_which_half_is_garbage_is_worse(in_process: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(2)
    Path("more.jsonl").write_text("".join(json.dumps({"text": prose(rng)}) + "\n" for _ in range(40)))
    arguments = ["data", "compare", "bad", "good", *TINY, *OPTIONS, "--heldout", "more.jsonl"]
    capsys.readouterr()
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "B is better" in out
    values = json.loads((FOLDER / "compare.json").read_text())
    assert (values["main"], values["tokens"]) == ("given", 19 * 1024 + 512)
    (pair,) = values["pairs"]
    assert (pair["verdict"], pair["worth"]["ratio"] > 1.2) == ("B better", True)
    assert {name: len(curves) for name, curves in values["curves"].items()} == {"A": 3, "B": 3}
    assert len(values["curves"]["A"][0]["tokens"]) == 20  # every second of 39 steps
    assert "<svg" in (FOLDER / "compare.html").read_text()
    assert not (FOLDER / "prepared").exists()
    assert len(in_process) == 6
    assert run([*arguments, "--json"]) == 0
    assert json_of(capsys)["pairs"] == values["pairs"]
    assert len(in_process) == 6
    assert run(["data", "compare", "bad", "good", *TINY, "--tokens", "30k", "--yes", "--heldout", "more.jsonl"]) == 2
    assert "tokens: 20000 -> 30000" in capsys.readouterr().err


@pytest.mark.exhaustive  # six trainings
def test_two_halves_of_one_set_show_no_difference(
    place: Path, in_process: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    for half in ("one", "two"):
        built(half, {f"{half}{i}": prose(rng, n_sentences=10) for i in range(100)})
    capsys.readouterr()
    assert run(["data", "compare", "one", "two", *TINY, "--tokens", "20k", "--yes", "--json"]) == 0
    values = json_of(capsys)
    (pair,) = values["pairs"]
    assert (pair["verdict"], pair["worth"], values["main"]) == ("no difference shown", None, "mean")
    low, high = pair["differences"]["mean"]["interval"]
    assert low < 0 < high
    assert len(in_process) == 6


@pytest.mark.exhaustive  # a comparison in real processes, killed at three moments
def test_a_killed_comparison_continues(place: Path) -> None:
    arguments = [sys.executable, "-m", "smalti", "data", "compare", "bad", "good", *TINY, *OPTIONS, "--seeds", "2",
                 "train.checkpoint.every=4step"]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}

    def start(output: str) -> "subprocess.Popen[str]":
        command = [*arguments, "--output", output]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0
        )

    moments = ("tokens/tokenizer", "runs/A-0/checkpoints/step-00000004/COMPLETE", "runs/B-0/metrics.jsonl")
    for moment in moments:
        process, end = start("killed"), time.monotonic() + 240
        while not Path("killed", moment).exists():
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert not Path("killed/compare.json").exists()
    for output in ("killed", "whole"):
        process = start(output)
        text = process.communicate(timeout=600)[0]
        assert process.returncode == 0, text
    results = [json.loads(Path(output, "compare.json").read_text()) for output in ("killed", "whole")]
    assert results[0]["scores"] == results[1]["scores"]
    assert results[0]["curves"] == results[1]["curves"]


@pytest.mark.usefixtures("place")
def test_a_plan_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["data", "compare", "bad", "good", "--dry-run"]) == 0
    assert "6 runs of 1M tokens, 0 finished" in capsys.readouterr().out
    assert run(["data", "compare", "bad", "good", "--dry-run", "--json", "--seeds", "2", "model.preset=depth-2"]) == 0
    values = json_of(capsys)
    assert (values["runs"], values["versions"]["A"]["folder"]) == (4, "bad")
    built("other", {"d": prose(random.Random(9), n_sentences=10)}, heldout_frac=0.0)
    capsys.readouterr()
    assert run(["data", "compare", "bad", "good", "other", "data.seq_len=128", "--dry-run", "--json"]) == 0
    values = json_of(capsys)
    assert (values["runs"], list(values["versions"])) == (9, ["A", "B", "C"])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["bad", "good"], "--yes trains", 2),
        (["bad", "bad"], "hold the same documents", 2),
        (["bad", "nowhere"], "nowhere", 2),
        (["bad", "good", "--tokens", "many", "--yes"], "--tokens many is no number", 2),
        (["bad", "good", "--tokens", "9k", "--yes"], "at least 16 steps", 2),
        (["bad", "good", "--yes", "train.duration=5step"], "hint: --tokens", 2),
        (["bad", "good", "--yes", "data.sources.x=y"], "'data.sources' is set by the comparison", 2),
        (["bad", "good", "--model", "continued.yaml", "--yes"], "has 'init_from'", 2),
        (["bad", "good", "--model", "instruct", "--yes"], "error: instruct has 'tune'", 2),
        (["bad", "good", "--model", "demon", "--yes"], "demo", 2),
        (["bad", "good", "good", "--yes"], "good and good hold the same documents", 2),
        (["bad", "good", *["good"] * 25, "--yes"], "27 versions", 2),
        (["bad", "good", "--tokenizer", "nowhere", "--yes"], "nowhere", 2),
        (["bad", "good", "--heldout", "nowhere", "--yes"], "nowhere", 2),
        (["bad", "good", "--seeds", "1", "--yes"], "--seeds", 2),
    ],
)
@pytest.mark.usefixtures("place")
def test_errors_say_what_to_do(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("continued.yaml").write_text("base: demo\ninit_from: runs/demo")
    assert run(["data", "compare", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").glob("*/data.json"))


@pytest.mark.usefixtures("place")
def test_sets_without_heldout_documents_need_further_text(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        built(f"whole{number}", {"d": prose(random.Random(number), n_sentences=10)}, heldout_frac=0.0)
    assert run(["data", "compare", "whole1", "whole2", "--yes"]) == 2
    assert "none of whole1, whole2 holds documents out" in capsys.readouterr().err
