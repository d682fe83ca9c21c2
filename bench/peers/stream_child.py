"""The child process of bench/stream.py and bench/stream_start.py: measures one loader.

A contender's script passes its functions to ``run``; or it calls ``imported()`` after its imports, ``built()`` when its
loader is ready, ``epoch()`` or ``first()`` with the batches, and ``end()``, which prints one line of JSON for the
parent. Times since process start count from the time at which the parent started it (by the monotonic clock, which all
processes share).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def memory() -> dict[str, int]:
    """Return the memory of this process in bytes: resident, not backed by a file, and peak since ``reset_peak``."""
    fields = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/self/{name}").read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB":
                fields[words[0]] = int(words[1]) * 1024
    return {"resident": fields["Rss:"], "private": fields["Anonymous:"], "peak": fields["VmHWM:"]}


def reset_peak() -> None:
    """Reset the peak resident size to the current one."""
    Path("/proc/self/clear_refs").write_text("5")


def written() -> dict[str, int]:
    """Return name -> bytes of the files in this child's home and temporary folder, and in /dev/shm."""
    sizes = {}
    for top in (os.environ["HOME"], os.environ["TMPDIR"], "/dev/shm"):
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    sizes[path] = os.stat(path).st_size
                except FileNotFoundError:
                    continue
    return sizes


class Child:
    """Clock and notes of one process; ``job`` is the job description of the parent."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(sys.argv[1])
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.notes: dict[str, Any] = {}
        self._before = set(written())
        reset_peak()
        self._bare = memory()

    def imported(self) -> None:
        """Note that all imports are done; memory is counted from here."""
        reset_peak()
        self._bare = memory()
        self.begin_s = time.monotonic()
        self.notes["imports_s"] = self.begin_s - self.job["asked_s"]
        self.notes["bare_bytes"] = self._bare["resident"]

    def built(self) -> None:
        """Note that the loader is built and its state loaded, before the first batch."""
        self.notes["build_s"] = time.monotonic() - self.begin_s

    def first(self, batch: Any) -> None:
        """Note the time, memory and files at the first batch, and its digest, to be compared with a whole epoch."""
        self._first_s = time.monotonic()
        self.notes["first_s"] = self._first_s - self.begin_s
        self.notes["first_from_process_s"] = self._first_s - self.job["asked_s"]
        new = {path: size for path, size in written().items() if path not in self._before}
        self.notes["files_at_first"] = {path: size for path, size in new.items() if not path.startswith("/dev/shm")}
        self.notes["shm_at_first"] = {path: size for path, size in new.items() if path.startswith("/dev/shm")}
        self._memory()
        self.notes["first_batch"] = rows_digest([batch])[1] if self.job["do"] == "first" else None

    def check(self, batches: Iterable[Any], state: Callable[[], Any]) -> None:
        """Note number and digest of the rows of an epoch; at the resume step, save the state and note the batch."""

        def watched() -> Iterator[Any]:
            for step, batch in enumerate(batches):
                if step == self.job["resume_step"]:
                    self.notes["resume_batch"] = rows_digest([batch])[1]
                elif step == self.job["resume_step"] - 1:
                    Path(self.job["save"]).write_text(json.dumps(state()))
                yield batch

        self.notes["rows"], self.notes["digest"] = rows_digest(watched())

    def epoch(self, batches: Iterable[Any]) -> None:
        """Read all batches, and time them from the first to the last."""
        n = 0
        begin_s = 0.0
        for batch in batches:
            n += 1
            if n == 1:
                self.first(batch)
                begin_s = time.monotonic()
            del batch
        self.notes["epoch_s"] = time.monotonic() - begin_s
        self.notes["batches_timed"] = n - 1
        self._memory()

    def run(
        self,
        make: Callable[[], None],
        build: Callable[[], Any],
        batches: Callable[[Any], Iterator[Any]],
        state: Callable[[Any], Any],
        rows: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        """Do the job with a contender's functions, after its imports.

        make: writes its data. build: returns its loader; batches: its batches; state: its state at the resume step;
        rows: the rows [B, L] of a batch.
        """
        self.imported()
        if self.job["do"] == "make":
            make()
        else:
            loader = build()
            self.built()
            if self.job["do"] == "check":
                self.check(map(rows, batches(loader)), lambda: state(loader))
            elif self.job["do"] == "first":
                self.first(rows(next(batches(loader))))
            else:
                self.epoch(batches(loader))
        self.end()

    def end(self) -> None:
        """Print the notes for the parent; the script then ends without further clean-up."""
        self._output.write(json.dumps(self.notes) + "\n")
        self._output.flush()

    def _memory(self) -> None:
        now = memory()
        self.notes["resident_bytes"] = now["resident"] - self._bare["resident"]
        self.notes["private_bytes"] = now["private"] - self._bare["private"]
        self.notes["peak_bytes"] = now["peak"] - self._bare["resident"]


def grouped(rows: Iterable[Any], n: int, join: Any) -> Iterable[Any]:
    """Group rows [L] into batches of ``n``, joined by ``join``."""
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == n:
            yield join(batch)
            batch = []
    if batch:
        yield join(batch)


def rows_digest(batches: Iterable[Any]) -> tuple[int, int]:
    """Return the number of rows, and a digest that is independent of their order and detects any changed, lost or
    repeated row."""
    import numpy as np

    n = 0
    total = np.uint64(0)
    factors: Any = None
    for batch in batches:
        rows = np.atleast_2d(np.asarray(batch)).astype(np.uint64)
        if factors is None:
            factors = np.random.default_rng(0).integers(1, 1 << 63, rows.shape[1], dtype=np.uint64)
        mixed = (rows + np.uint64(1)) * factors
        mixed = mixed.sum(axis=1, dtype=np.uint64)
        mixed ^= mixed >> np.uint64(29)
        total = total + (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64)
        n += len(rows)
    return n, int(total)
