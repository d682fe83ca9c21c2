"""Results of finished tasks, kept below a run folder, so that an interrupted evaluation resumes after the last of them.

The key of a result is a digest of everything that it depends on: the model's files, the task with its file, the
settings, and Smalti's code. Each result is a file, written completely or not at all.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import smalti
from smalti.base import store
from smalti.base.hashing import digest_json, sha256_file
from smalti.evals.results import TaskResult
from smalti.track.registry.facts import RECORD

_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja")
"""Without the record of the export, which has its time: the same weights exported again are the same model."""


class Cache:
    """Cached results of one model, in one number format."""

    def __init__(self, folder: str | Path, model: str | Path, dtype: str) -> None:
        """``folder``: of the cache. ``model``: the local folder of the model."""
        self._folder = Path(folder)
        files = sorted({path for pattern in _MODEL_FILES for path in Path(model).glob(pattern) if path.name != RECORD})
        self._about = {"model": {path.name: sha256_file(path) for path in files}, "dtype": dtype, "code": _code()}

    def result(self, task: Any, compute: Callable[[], TaskResult]) -> TaskResult:
        """Return the cached result of ``task``, a JSON value that describes it and its settings; else compute and cache
        it. The score of a cached one has ``cached: true``. A damaged file is computed again."""
        path = self._folder / f"{digest_json([self._about, task])}.json"
        if path.exists():
            with suppress(ValueError):
                values = json.loads(path.read_bytes())
                return TaskResult(values["name"], {**values["score"], "cached": True}, values["samples"])
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_json(path, asdict(result))
        return result


def _code() -> str:
    """Return a digest of Smalti's source files."""
    root = Path(smalti.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
