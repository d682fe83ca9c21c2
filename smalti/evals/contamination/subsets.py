"""Scores of an evaluation on its clean and its contaminated items, beside those on all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.evals.contamination.judge import STATUSES, Judgement
from smalti.evals.tasks.accuracy import accuracy


def tasks_of(results_folder: str | Path, digests: Mapping[str, str]) -> list[str]:
    """Return the tasks of an evaluation that have an accuracy of the same file.

    ``digests``: task -> SHA-256 of its file. Raises DataError if the folder has no results.
    """
    path = store.join(results_folder, "results.json")
    if not store.exists(path):
        raise DataError(
            f"{results_folder} holds no results.json", hint="name the folder of an evaluation: RUN/evals/SUITE/TIME"
        )
    scores = store.read_json(path)["tasks"]
    return [
        task
        for task, digest in digests.items()
        if "accuracy" in scores.get(task, {}) and scores[task].get("sha256") == digest
    ]


def newest(suite_folder: str | Path, digests: Mapping[str, str]) -> Path | None:
    """Return the newest evaluation of a suite that has such tasks; None if there is none."""
    folders = (path.parent for path in Path(suite_folder).glob("*/results.json"))
    evaluations = sorted((path for path in folders if not path.name.startswith(".")), reverse=True)
    return next((path for path in evaluations if tasks_of(path, digests)), None)


def add_subsets(results_folder: str | Path, judgements: Mapping[str, Judgement], source: str) -> dict[str, Any]:
    """Add ``contamination`` to the scores of these tasks in an evaluation, which must have them (``tasks_of``).

    It has ``path`` (``source``, the folder of the check) and for each status ``n`` and, if that is above 0, the
    accuracy with its interval. Returns the scores. Raises DataError for a sample of an item that was not checked.
    """
    path = store.join(results_folder, "results.json")
    results = store.read_json(path)
    samples: dict[str, list[dict[str, Any]]] = {}
    data = store.read_bytes(store.join(results_folder, "samples.jsonl"))
    for line in data.decode("utf-8", "surrogatepass").split("\n"):
        if line:
            sample = json.loads(line)
            samples.setdefault(sample["task"], []).append(sample)
    scores = {task: results["tasks"][task] for task in judgements}
    for task, score in scores.items():
        subsets = _subsets(task, samples.get(task, []), judgements[task], score["chance"])
        score["contamination"] = {"path": source, **subsets}
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
                allowed="an evaluation of the file that is checked",
                hint="evaluate again, or name the right evaluation: --results RUN/evals/SUITE/TIME",
            )
        parts[status].append(sample)
    return {status: accuracy(part, chance) if part else {"n": 0} for status, part in parts.items()}
