"""Scores of an evaluation on its clean and its contaminated items, beside those on all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.evals.contamination.judge import STATUSES, Judgement
from smalti.evals.tasks.accuracy import accuracy


def add_subsets(results_folder: str | Path, judgements: Mapping[str, Judgement], source: str) -> dict[str, Any]:
    """Add ``contamination`` to each score of the evaluation in ``results_folder`` whose task was checked.

    It has ``path`` (``source``, the folder of the check) and for each status ``n`` and, if that is above 0, the
    accuracy with its interval. Returns the scores of these tasks. Raises DataError for an item that was not checked.
    """
    path = store.join(results_folder, "results.json")
    if not store.exists(path):
        raise DataError(
            f"{results_folder} holds no results.json", hint="name the folder of an evaluation: RUN/evals/SUITE/TIME"
        )
    results = store.read_json(path)
    samples: dict[str, list[dict[str, Any]]] = {}
    for line in (
        store.read_bytes(store.join(results_folder, "samples.jsonl")).decode("utf-8", "surrogatepass").split("\n")
    ):
        if line:
            sample = json.loads(line)
            samples.setdefault(sample["task"], []).append(sample)
    scores = {}
    for task, judgement in judgements.items():
        score = results["tasks"].get(task)
        if score is not None and "accuracy" in score:
            score["contamination"] = {
                "path": source,
                **_subsets(task, samples.get(task, []), judgement, score["chance"]),
            }
            scores[task] = score
    store.write_json(path, results)
    return scores


def _subsets(task: str, samples: list[dict[str, Any]], judgement: Judgement, chance: float) -> dict[str, Any]:
    status_of = {item["index"]: (item["status"], item.get("id")) for item in judgement.items}
    parts: dict[str, list[dict[str, Any]]] = {status: [] for status in STATUSES}
    for sample in samples:
        status, name = status_of.get(sample["index"], (None, None))
        if status is None or sample.get("id") != name:
            raise DataError(
                f"item {sample.get('id', sample['index'])} of {task} in the evaluation is not the one that was checked",
                allowed="an evaluation of the same file",
                hint="evaluate again, or name the file that was evaluated",
            )
        parts[status].append(sample)
    return {status: accuracy(part, chance) if part else {"n": 0} for status, part in parts.items()}
