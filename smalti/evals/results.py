"""The files of an evaluation: one result for each task, one sample for each question or document.

``results.json`` and ``samples.jsonl`` appear together or not at all: they are written into a temporary sibling folder
that then takes its name.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smalti.base import clock, store


@dataclass(frozen=True)
class TaskResult:
    """A score with its spread and its n; ``samples`` hold the result of each question."""

    name: str
    score: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)


def write(folder: str | Path, results: dict[str, Any], tasks: list[TaskResult]) -> str:
    """Write ``<folder>/<UTC time>/{results.json, samples.jsonl}``; returns that folder. A local folder only."""
    final = Path(folder) / clock.utc_text().replace(":", "-")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        store.write_json(temporary / "results.json", results)
        with store.open_write(temporary / "samples.jsonl") as file:
            for task in tasks:
                for sample in task.samples:
                    line = json.dumps({"task": task.name, **sample}, ensure_ascii=False)
                    file.write(line.encode("utf-8", "surrogatepass") + b"\n")
        os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return str(final)
