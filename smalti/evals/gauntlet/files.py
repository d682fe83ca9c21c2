"""The Gauntlet's files: where they are below a folder, which are missing, and what each is."""

import hashlib
from dataclasses import dataclass
from typing import Any

from smalti.base import store
from smalti.base.errors import UserError
from smalti.evals.gauntlet.table import BENCHMARKS, Benchmark

SOURCE = "https://github.com/mosaicml/llm-foundry (folder scripts/eval/local_data)"
NEEDS_SANDBOX = "needs the sandbox, which does not exist yet"


def path_of(benchmark: Benchmark, folder: str) -> str | None:
    """Return the path of a benchmark's file, in LLM Foundry's layout or flat; None where it is missing."""
    for path in (benchmark.path, f"{benchmark.file}.jsonl"):
        if store.exists(store.join(folder, path)):
            return store.join(folder, path)
    return None


def missing(folder: str) -> dict[str, str]:
    """Return the benchmarks that cannot be run, each with the reason."""
    reasons = {}
    for benchmark in BENCHMARKS:
        if benchmark.kind == "code":
            reasons[benchmark.name] = NEEDS_SANDBOX
        elif path_of(benchmark, folder) is None:
            reasons[benchmark.name] = f"no file {benchmark.path}"
    return reasons


def require_folder(folder: str | None) -> str:
    """Return the folder; raises UserError where none is given."""
    if folder is None:
        raise UserError(
            "the Gauntlet's files are not part of Smalti",
            allowed="data=DIR, a folder with CATEGORY/FILE.jsonl",
            hint=f"get them from {SOURCE}",
        )
    return folder


@dataclass(frozen=True)
class FileCheck:
    """What is known of a benchmark's file."""

    benchmark: Benchmark
    path: str | None
    sha256: str | None = None
    n_rows: int | None = None

    @property
    def state(self) -> str:
        """missing; as published; different; or unknown digest, where none is known to compare with."""
        if self.path is None or self.sha256 is None:
            return "missing"
        if self.benchmark.sha256 is None:
            return "unknown digest"
        return "as published" if self.sha256.startswith(self.benchmark.sha256) else "different"

    def row(self) -> dict[str, Any]:
        """Return it as plain values."""
        benchmark = self.benchmark
        return {
            "task": benchmark.name,
            "category": benchmark.category,
            "file": self.path or benchmark.path,
            "state": self.state,
            "sha256": self.sha256,
            "rows": self.n_rows,
            "licence": benchmark.licence,
            "runs": benchmark.kind != "code" and self.path is not None,
        }


def check(folder: str) -> list[FileCheck]:
    """Return the state of the file of each of the 39 benchmarks."""
    checks = []
    for benchmark in BENCHMARKS:
        path = path_of(benchmark, folder)
        if path is None:
            checks.append(FileCheck(benchmark, None))
            continue
        data = store.read_bytes(path)
        n_rows = sum(bool(line.strip()) for line in data.split(b"\n"))
        checks.append(FileCheck(benchmark, path, hashlib.sha256(data).hexdigest(), n_rows))
    return checks
