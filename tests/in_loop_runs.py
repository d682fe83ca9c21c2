"""Tiny runs with tasks during training, and the scores of the same tasks on an export."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_runs import tiny_run

from smalti.config.eval import EvalConfig
from smalti.config.load import from_dict, load
from smalti.config.run import RunConfig
from smalti.distributed.checkpoint.export import export
from smalti.evals import suite
from smalti.serve.engine.engine import Engine

ROWS = [
    {"query": "3+4=", "choices": ["7", "12", "x y"], "gold": 0},
    {"query": "def add(a, b):", "choices": ["return a + b", "plain"], "gold": 0},
    {"query": "plain", "choices": ["words", "x: int", "Point"], "gold": 0},
]
SUMS = [{"context": f"{a}+4=", "answer": str(a + 4)} for a in range(6)]
RULES = [
    {"key": n, "prompt": f"Write {n} words.", "instruction_id_list": [name], "kwargs": [kwargs]}
    for n, (name, kwargs) in enumerate(
        [
            ("punctuation:no_comma", {}),
            ("length_constraints:number_words", {"num_words": 90, "relation": "at least"}),
            ("change_case:english_lowercase", {}),
        ]
    )
]
RANKED = ("arithmetic", "brackets", {"kind": "choice", "file": "own.jsonl", "shots": 1})
GENERATED = (
    {"kind": "generation", "file": "sums.jsonl", "shots": 1, "max_new_tokens": 6},
    {"kind": "ifeval", "file": "rules.jsonl", "max_new_tokens": 16},
)


def run_config(
    root: Path, ranks: int = 1, *, tasks: Sequence[Any] = RANKED, train: dict[str, Any] | None = None, **evals: Any
) -> RunConfig:
    """The config of a run of five steps in ``root``; files of tasks are there."""
    if not (root / "runs/tiny").exists():
        tiny_run(root)
        for name, rows in {"own": ROWS, "sums": SUMS, "rules": RULES}.items():
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = load(RunConfig, str(root / "runs/tiny")).config.model_dump(mode="json")
    values |= {"name": f"ranks-{ranks}", "folder": str(root / f"runs/ranks-{ranks}"), "track": {"console": False}}
    values["data"] |= {"tokenizer": str(root / "data/tokenizer"), "seq_len": 64}
    values["data"]["heldout"] = {}
    values["train"] |= {"duration": "5step", "precision": {"compute": "fp32"}, "global_batch_tokens": 128}
    values["train"] |= {"parallel": {"ranks": ranks, "threads": 1, "device": "cpu"}, **(train or {})}
    named = [task if isinstance(task, str) else task | {"file": str(root / task["file"])} for task in tasks]
    questions = {"n": 12, "shots": 1} if "arithmetic" in tasks else {}
    values["evals"] = {"tasks": named, "every": "2step", **questions, **evals}
    return from_dict(RunConfig, values, "test").config


def scores_of(config: RunConfig) -> dict[int, dict[str, float]]:
    """Step -> metrics of tasks, in ``metrics.jsonl``."""
    rows: dict[int, dict[str, float]] = {}
    for row in map(json.loads, (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines()):
        scores = {name: value for name, value in row.items() if name.startswith("icl/")}
        if scores:
            rows.setdefault(row["step"], {}).update(scores)
    return rows


def events_of(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """The events of a kind."""
    events = map(json.loads, (Path(config.run_folder) / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def on_export(config: RunConfig) -> dict[str, Any]:
    """The results of ``smalti eval run`` on the export of the newest checkpoint."""
    assert config.evals is not None
    export(config.run_folder)
    engine = Engine.from_folder(Path(config.run_folder) / "export")
    asked = config.evals.model_dump(mode="json", include=set(EvalConfig.model_fields))
    asked |= {"seq_len": config.data.seq_len}
    return suite.run(engine, from_dict(EvalConfig, asked, "test").config, str(Path(config.run_folder) / "after"))


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    """Results under the names of the metrics."""
    measures = {"": "accuracy", "/stderr": "stderr"}
    measures |= {f"/{name}": name for name in ("gold_probability", "bits_per_byte", "truncated_frac")}
    values = {
        f"{task}{end}": score[key]
        for task, score in results["tasks"].items()
        for end, key in measures.items()
        if key in score
    }
    for task, score in results["tasks"].items():
        values[f"{task}/low"], values[f"{task}/high"] = score["interval"]
    return {f"icl/metrics/demo/{name}": value for name, value in values.items()}
