"""Tuning on synthetic instructions: exact answers to held-out ones over supervised tuning, then DPO.

    make bench NAME=tune_instructions                                                        40 minutes on an idle core
    make bench NAME=tune_instructions ARGS='--split validation --seeds 1 --dpo 1'    to choose by

For each seed: the recipe ``demo-chat`` from the demo's model, and the recipe ``dpo`` from the model that had done a
quarter of those steps. Measured on rows whose operands are in no training row: exact answers, whether the right answer
is likelier than the wrong one, and log-probabilities of both. Finished runs are not repeated on the same code.
``--record`` writes bench/results/tune_instructions.json, ``--picture`` the plots.
"""

import argparse
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_runs import SOURCES, bits_per_byte, prepared, smalti
from numpy.typing import NDArray
from record import ROOT, RecordOption, record

from smalti.base.chart import Series, line_chart, standalone
from smalti.config.eval import EvalConfig
from smalti.data.tokenizer.chat import load_chat
from smalti.distributed.checkpoint.export import export
from smalti.evals import suite
from smalti.evals.likelihood import Window, score_greedy
from smalti.evals.statistics import paired
from smalti.evals.statistics.intervals import mean
from smalti.serve.engine.engine import Engine
from smalti.tune.chats import tokenize
from smalti.tune.instructions import write

FILES = "data/demo/instructions"
PICTURES = ROOT / "docs" / "concepts" / "pictures"
SIDES = ("chosen", "rejected")
ONE_THREAD = ("train.parallel.ranks=1", "train.parallel.threads=1", "train.parallel.device=cpu")
CHECKPOINTS = ("train.checkpoint.every=0.25run", "train.checkpoint.keep=5")  # rounding may add one
DPO = (f"tune.examples.files=[{FILES}/preferences.jsonl]", "train.optimizer.lr=2e-4", "train.global_batch_tokens=2048")


class Model:
    """A folder with a model, and what is measured of it, kept beside it."""

    def __init__(self, folder: Path, data: Path, split: str, chat: Path | None = None) -> None:
        self._folder, self._data, self._split = folder, data, split
        self._chat = chat or folder

    @cached_property
    def exact(self) -> dict[str, Any]:
        """Exact answers, with their interval and those of each kind."""
        task = self._data / ("instructions.yaml" if self._split == "heldout" else f"{self._split}.yaml")

        def measure() -> dict[str, Any]:
            config = EvalConfig(suite="instructions", tasks=(str(task),))
            report = suite.run(self._engine, config, chat=load_chat(self._folder))
            score = report["tasks"][task.stem]
            return {key: score[key] for key in ("value", "interval", "n", "categories")}

        return self._kept("exact", measure)

    @cached_property
    def log_probabilities(self) -> dict[str, NDArray[np.float64]]:
        """Side -> log-probability of each row's answer, with its end of turn."""

        def measure() -> dict[str, list[float]]:
            return {side: (-score_greedy(self._engine.model, self._windows(side)).nats).tolist() for side in SIDES}

        return {side: np.array(values) for side, values in self._kept("preferences", measure).items()}

    def _windows(self, side: str) -> list[Window]:
        windows = []
        for line in (self._data / f"{self._split}-preferences.jsonl").read_text().splitlines():
            row = json.loads(line)
            messages = [*row["prompt"], {"role": "assistant", "content": row[side]}]
            ids, mask = tokenize(messages, self._chat, last_turn=True)
            scored = np.flatnonzero(mask)
            windows.append(Window(np.array(ids[: scored[-1] + 1], dtype=np.int64), int(scored[0])))
        return windows

    @cached_property
    def _engine(self) -> Engine:
        return Engine.from_folder(str(self._folder), device="cpu")

    def _kept(self, name: str, measure: Callable[[], Any]) -> Any:
        path = self._folder.with_name(f"{self._folder.name}-{self._split}-{name}.json")
        if not path.exists():
            path.write_text(json.dumps(measure()))
        return json.loads(path.read_text())


def finished(run: Path) -> bool:
    """Return whether a run has ended."""
    status = run / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "done"


def base_model(folder: Path, steps: int) -> Path:
    """Train the demo's model in ``folder``, unless that is done; return its export."""
    run = folder / "runs/demo"
    if not finished(run):
        smalti(folder, "train", "demo", f"train.duration={steps}step", *ONE_THREAD)
    return run / "export" if (run / "export").is_dir() else Path(export(run))


def tuned(folder: Path, verb: str, recipe: str, seed: int, init_from: Path, *overrides: str) -> Path:
    """Tune on one rank, unless that is done; return the run's folder."""
    name = f"{recipe}-{seed}"
    if not finished(folder / "runs" / name):
        smalti(
            folder, "tune", verb, recipe, f"name={name}", f"seed={seed}", f"init_from={init_from}", *ONE_THREAD,
            *CHECKPOINTS, *overrides,
        )  # fmt: skip
    return folder / "runs" / name


def exports(run: Path) -> dict[int, Path]:
    """Return step -> model of each checkpoint of a run, in order."""
    models = {}
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        step = int(checkpoint.name.removeprefix("step-"))
        models[step] = run / "models" / str(step)
        if not models[step].is_dir():
            export(run, step=step, output=models[step])
    return models


def forgotten(run: Path) -> dict[str, list[float]]:
    """Return source -> held-out bits per byte before and after a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = bits_per_byte(rows[::-1]), bits_per_byte(rows)
    return {source: [first[source], last[source]] for source in SOURCES}


def preferences(model: Model) -> dict[str, Any]:
    """Return the share of pairs whose right answer is likelier, and the mean log-probabilities."""
    sides = model.log_probabilities
    return {
        "accuracy": mean(sides["chosen"] > sides["rejected"]).to_score(),
        **{f"logp_{side}": float(sides[side].mean()) for side in SIDES},
    }


def supervised(folder: Path, seed: int, split: str) -> dict[str, Any]:
    """Tune on the answers with a seed; print and return the figures."""
    run = tuned(folder, "sft", "demo-chat", seed, folder / "runs/demo/export")
    exact = {step: Model(path, folder / FILES, split).exact for step, path in exports(run).items()}
    figures = {"exact": exact, "bits_per_byte": forgotten(run)}
    _print(f"seed {seed}: exact after {max(exact)} steps", exact[max(exact)])
    print("  bits per byte", json.dumps(figures["bits_per_byte"]), flush=True)
    return figures


def preferred(folder: Path, seed: int, split: str) -> dict[str, Any]:
    """Tune on preferences, from a quarter of the steps of ``supervised``; print and return the figures."""
    start, origin = min(exports(folder / "runs" / f"demo-chat-{seed}").items())
    folders = {0: origin, **exports(tuned(folder, "preference", "dpo", seed, origin, *DPO))}
    models = {step: Model(path, folder / FILES, split) for step, path in folders.items()}
    before, after = models[0], models[max(models)]
    right = [model.log_probabilities["chosen"] > model.log_probabilities["rejected"] for model in (before, after)]
    change = paired.of_items(*right)
    figures = {
        "from_step": start,
        "steps": {step: preferences(model) for step, model in models.items()},
        "change": {"value": change.value, "interval": change.interval, "p": change.p},
        "exact": [before.exact, after.exact],
    }
    for step, figure in figures["steps"].items():
        logps = ", ".join(f"{side} {figure[f'logp_{side}']:.2f}" for side in SIDES)
        _print(f"seed {seed}: DPO step {step}, log-probability of {logps}; accuracy", figure["accuracy"])
    print("  change", json.dumps(figures["change"]))
    _print("  exact before", before.exact)
    _print("  exact after", after.exact)
    return figures


def _print(name: str, score: dict[str, Any]) -> None:
    kinds = {kind: round(of_kind["accuracy"], 3) for kind, of_kind in score.get("categories", {}).items()}
    print(f"{name} {score['value']:.3f} [{score['interval'][0]:.3f}, {score['interval'][1]:.3f}] {kinds}", flush=True)


def draw(before: dict[str, Any], sft: dict[int, dict[str, Any]], dpo: dict[int, dict[str, Any]]) -> dict[str, str]:
    """Return file name -> plot."""
    exact, accuracy, logps = [], [], []
    for seed, figures in sft.items():
        values = [before["value"], *(score["value"] for score in figures["exact"].values())]
        exact.append(Series(f"seed {seed}", [0, *figures["exact"]], values, colour=seed))
    for seed, figures in dpo.items():
        steps, values = list(figures["steps"]), list(figures["steps"].values())
        accuracy.append(Series(f"seed {seed}", steps, [value["accuracy"]["value"] for value in values], colour=seed))
        for side in SIDES:
            name, y = f"{side}, seed {seed}", [value[f"logp_{side}"] for value in values]
            logps.append(Series(name, steps, y, colour=seed, named_at_end=True))
    return {
        "tune-instructions.svg": line_chart(
            exact, title="Exact answers to held-out instructions over supervised tuning", x_label="step", from_zero=True
        ),
        "tune-preferences.svg": line_chart(
            accuracy, title="DPO: held-out pairs whose right answer is likelier", x_label="step"
        ),
        "tune-preferences-logp.svg": line_chart(
            logps, title="DPO: mean log-probability of held-out answers", x_label="step"
        ),
    }


def main() -> None:
    """Print the figures of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/tune_instructions", help="folder of the runs")
    parser.add_argument("--split", choices=["heldout", "validation"], default="heldout", help="rows to measure with")
    parser.add_argument("--base-steps", type=int, default=1200, help="of the demo's model, which is tuned")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of supervised tuning")
    parser.add_argument("--dpo", type=int, nargs="*", default=[1, 2, 3], help="those of them that DPO follows")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/tune_instructions.json")
    parser.add_argument("--picture", action="store_true", help="write the plots of docs/concepts/pictures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = prepared(options.folder)
    write(str(folder / FILES))
    base = base_model(folder, options.base_steps)
    before = Model(base, folder / FILES, options.split).exact
    _print("before: exact", before)
    sft = {seed: supervised(folder, seed, options.split) for seed in options.seeds}
    dpo = {seed: preferred(folder, seed, options.split) for seed in options.dpo}
    if options.picture:
        for name, svg in draw(before, sft, dpo).items():
            (PICTURES / name).write_text(standalone(svg) + "\n")
    if options.record:
        figures = {"split": options.split, "base_steps": options.base_steps, "before": before, "sft": sft, "dpo": dpo}
        print("wrote", record("tune_instructions", figures))


if __name__ == "__main__":
    main()
