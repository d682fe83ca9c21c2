"""One loss curve: the same run on 1, 2, 3, 4, 6 and 8 ranks, and killed twice and resumed on other numbers of ranks.

    make bench NAME=same_curve                          about 4 minutes on two cores
    make bench NAME=same_curve ARGS='--steps 30'

Runs ``smalti train`` on a small Llama in fp32, on the code and documentation of the installed Python in two stages. The
tokens of each step are the same by construction; losses differ by the rounding of sums in another order. ``--record``
writes bench/results/same_curve.json, ``--picture`` the two plots for the docs.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from record import RecordOption, record

from smalti.base.chart import Marker, Series, line_chart, standalone
from smalti.config.load import dump, from_dict
from smalti.config.run import RunConfig
from smalti.data.documents.installed_python import write_documents
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens import TokenWriter

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "concepts" / "pictures"
SEQ_LEN, ROWS, VOCAB_SIZE = 64, 32, 512
SOURCE_BYTES = 600_000
LIMIT_S = 300
RANKS = (1, 2, 3, 4, 6, 8)


def prepare(folder: Path) -> None:
    """Write token files of code and prose, and their tokenizer."""
    write_documents(str(folder / "documents"))
    texts: dict[str, list[str]] = {}
    for name in ("code", "prose"):
        texts[name], size = [], 0
        for line in (folder / "documents" / f"{name}.jsonl").read_text().splitlines():
            texts[name].append(json.loads(line)["text"])
            size += len(texts[name][-1])
            if size > SOURCE_BYTES:
                break
    tokenizer = Tokenizer(train_bpe([text[:4000] for of in texts.values() for text in of], VOCAB_SIZE), "<|endoftext|>")
    tokenizer.save(folder / "tokenizer")
    for name, of in texts.items():
        with TokenWriter(
            folder / name,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_digest=tokenizer.digest,
        ) as writer:
            for text in of:
                writer.add(tokenizer.encode(text), len(text.encode()))


def recipe(folder: Path, name: str, steps: int) -> Path:
    """Write the recipe under this name; recipes differ only in the name."""
    config = from_dict(
        RunConfig,
        {
            "name": name,
            "folder": str(folder / "runs" / name),
            "model": {
                "family": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 176,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": SEQ_LEN,
            },
            "data": {
                "sources": {name: str(folder / name) for name in ("code", "prose")},
                "tokenizer": str(folder / "tokenizer"),
                "seq_len": SEQ_LEN,
                "stages": [
                    {"until": "0.5run", "weights": {"code": 0.7, "prose": 0.3}},
                    {"weights": {"code": 0.3, "prose": 0.7}},
                ],
            },
            "train": {
                "duration": f"{steps}step",
                "global_batch_tokens": ROWS * SEQ_LEN,
                "optimizer": {"lr": 5e-3},
                "precision": {"compute": "fp32"},
                "checkpoint": {"every": f"{max(2, steps // 12)}step", "keep": 2},
                "parallel": {"device": "cpu", "threads": 1},
            },
            "track": {"console": False},
        },
        "same_curve",
    ).config
    path = folder / f"{name}.yaml"
    path.write_text(dump(config))
    return path


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss of the steps so far."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    by_step = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the line that is being written
            continue
        if "loss/train/total" in row:
            by_step[int(row["step"])] = float(row["loss/train/total"])
    return by_step


def train(folder: Path, name: str, steps: int, ranks: int, *, kill_at: int | None = None) -> int:
    """Start or resume a run; at ``kill_at`` steps kill it and all its ranks. Returns the last step."""
    command = [sys.executable, "-m", "smalti", "train", str(recipe(folder, name, steps))]
    run, log = folder / "runs" / name, folder / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen([*command, f"train.parallel.ranks={ranks}"], stdout=out, stderr=out, cwd=folder)
        end_s = time.monotonic() + LIMIT_S
        while process.poll() is None:
            if kill_at is not None and max(losses(run), default=0) >= kill_at:
                _kill(process)
                break
            if time.monotonic() > end_s:
                _kill(process)
                raise RuntimeError(f"{name} was still running after {LIMIT_S} s:\n{log.read_text()[-3000:]}")
            time.sleep(0.01)
    if kill_at is None and process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return max(losses(run), default=0)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to the agent and its ranks."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=10)


def all_runs(folder: Path, steps: int) -> tuple[dict[str, dict[int, float]], list[dict[str, int]]]:
    """Return name -> loss of each step; and where the killed run was killed and resumed."""
    for ranks in RANKS:
        print(f"{ranks} rank(s) ...", file=sys.stderr, flush=True)
        train(folder, f"ranks-{ranks}", steps, ranks)
    kills = []
    for ranks, kill_at in ((2, round(0.4 * steps)), (4, round(0.7 * steps)), (1, None)):
        print(f"killed run, {ranks} rank(s) ...", file=sys.stderr, flush=True)
        last_step = train(folder, "killed", steps, ranks, kill_at=kill_at)
        kills.append({"ranks": ranks, "step": last_step})
    events = [json.loads(line) for line in (folder / "runs" / "killed" / "events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    for kill, step in zip(kills[:-1], resumed, strict=True):
        kill["went_on_from_step"] = step
    names = {f"ranks-{ranks}": f"{ranks} rank" + "s" * (ranks > 1) for ranks in RANKS}
    curves = {label: losses(folder / "runs" / name) for name, label in names.items()}
    return {**curves, "killed": losses(folder / "runs" / "killed")}, kills


def apart(curves: dict[str, dict[int, float]]) -> dict[str, float]:
    """Return the largest difference of any step from the run on one rank."""
    reference = curves["1 rank"]
    for name, curve in curves.items():
        if sorted(curve) != sorted(reference):
            raise RuntimeError(f"{name} has {len(curve)} steps, the run on reference rank {len(reference)}")
    return {name: max(abs(curve[step] - reference[step]) for step in reference) for name, curve in curves.items()}


def pictures(curves: dict[str, dict[int, float]], kills: list[dict[str, int]]) -> dict[str, str]:
    """Return plots of the curves, and of their distance from the first."""
    markers = [
        Marker(kill["step"], f"kill -9 at step {kill['step']} on {kill['ranks']} ranks; resumed from step "
               f"{kill['went_on_from_step']} on {after['ranks']}")
        for kill, after in itertools.pairwise(kills)
    ]  # fmt: skip
    ranks = " then ".join(str(kill["ranks"]) for kill in kills)
    names = {name: f"{ranks} ranks, killed twice" if name == "killed" else name for name in curves}
    steps = sorted(curves["1 rank"])
    lines = [Series(names[name], steps, [curve[step] for step in steps]) for name, curve in curves.items()]
    reference = curves["1 rank"]
    differences = [
        Series(names[name], steps, [1e6 * abs(curve[step] - reference[step]) for step in steps], colour=number)
        for number, (name, curve) in enumerate(curves.items())
        if name != "1 rank"
    ]
    title = f"Training loss (nats a token): {len(curves)} runs, one curve; dashed: kill -9"
    far = "Distance from the run on one rank, in millionths of a nat: the rounding of sums"
    return {
        "same-curve.svg": line_chart(lines, title=title, x_label="step", markers=markers),
        "same-curve-apart.svg": line_chart(
            differences, title=far, x_label="step", markers=markers, height=200, from_zero=True
        ),
    }


def main() -> None:
    """Print the largest differences; ``--record`` also writes bench/results/same_curve.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", help="folder for the runs; absent: a temporary one")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/same_curve.json")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURES.relative_to(ROOT)}/same-curve*.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="same-curve-") as folder:
        prepare(Path(folder))
        curves, kills = all_runs(Path(folder), options.steps)
    largest = apart(curves)
    reference = curves["1 rank"]
    loss = f"{reference[1]:.4f} to {reference[options.steps]:.4f}"
    print(f"\n{options.steps} steps of {ROWS} x {SEQ_LEN} tokens; loss {loss}")
    for before, after in itertools.pairwise(kills):
        print(
            f"kill -9 at step {before['step']} on {before['ranks']} ranks, resumed from step "
            f"{before['went_on_from_step']} on {after['ranks']}"
        )
    for name, difference in largest.items():
        if name != "1 rank":
            print(f"{name:8} largest difference of a step's loss from one rank's: {difference:.2e}")
    if options.record:
        figures: dict[str, Any] = {"steps": options.steps, "kills": kills, "largest_difference": largest}
        figures["loss"] = {name: [curve[step] for step in sorted(curve)] for name, curve in curves.items()}
        print("wrote", record("same_curve", figures))
    if options.picture:
        PICTURES.mkdir(exist_ok=True)
        for name, svg in pictures(curves, kills).items():
            (PICTURES / name).write_text(standalone(svg) + "\n")
            print("wrote", PICTURES / name)


if __name__ == "__main__":
    main()
