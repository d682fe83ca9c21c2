"""The child's half of bench/stream.py and bench/stream_start.py: one loader in one process, watched by its own clock.

A contender's script hands its functions to ``run``, or it says ``imported()`` when its imports are done, ``built()``
when its loader stands, gives what the loader hands out to ``epoch()`` or ``first()``, and ``end()`` prints one line
of JSON for the parent. Times that begin at the start of the process count from when the parent asked for it (its
monotonic clock, which all processes share).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def memory() -> dict[str, int]:
    """Bytes of this process: resident, the part that no file backs, and the highest so far since ``forget_peak``."""
    found = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/self/{name}").read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB":
                found[words[0]] = int(words[1]) * 1024
    return {"resident": found["Rss:"], "private": found["Anonymous:"], "peak": found["VmHWM:"]}


def forget_peak() -> None:
    """Let the highest resident size begin at the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def written() -> dict[str, int]:
    """Files below this child's own home and temporary folder, and everything in /dev/shm: name -> bytes."""
    found = {}
    for top in (os.environ["HOME"], os.environ["TMPDIR"], "/dev/shm"):
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    found[path] = os.stat(path).st_size
                except FileNotFoundError:
                    continue
    return found


class Child:
    """Clock and notes of one process; ``job`` is what the parent asked for."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(sys.argv[1])
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.notes: dict[str, Any] = {}
        self._before = set(written())
        forget_peak()
        self._bare, self._built_s = memory(), 0.0

    def imported(self) -> None:
        """All imports are done: memory counts from here."""
        forget_peak()
        self._bare = memory()
        self.begin_s = time.monotonic()
        self.notes["imports_s"] = self.begin_s - self.job["asked_s"]
        self.notes["bare_bytes"] = self._bare["resident"]

    def built(self) -> None:
        """The loader stands, its state is loaded; the first batch has not been asked for."""
        self._built_s = time.monotonic()
        self.notes["build_s"] = self._built_s - self.begin_s

    def first(self, batch: Any) -> None:
        """The first batch is here; what it is will be compared with the batch of the uninterrupted epoch."""
        self._first_s = time.monotonic()
        self.notes["first_s"] = self._first_s - self.begin_s
        self.notes["first_from_process_s"] = self._first_s - self.job["asked_s"]
        found = {path: size for path, size in written().items() if path not in self._before}
        self.notes["files_at_first"] = {path: size for path, size in found.items() if not path.startswith("/dev/shm")}
        self.notes["shm_at_first"] = {path: size for path, size in found.items() if path.startswith("/dev/shm")}
        self._memory()
        self.notes["first_batch"] = rows_digest([batch])[1] if self.job["do"] == "first" else None

    def check(self, batches: Iterable[Any], state: Callable[[], Any]) -> None:
        """Note how many rows an epoch has and what they are; at the resume step, save the state and note the batch."""

        def watched() -> Iterator[Any]:
            for step, batch in enumerate(batches):
                if step == self.job["resume_step"]:
                    self.notes["resume_batch"] = rows_digest([batch])[1]
                elif step == self.job["resume_step"] - 1:
                    Path(self.job["save"]).write_text(json.dumps(state()))
                yield batch

        self.notes["rows"], self.notes["digest"] = rows_digest(watched())

    def epoch(self, batches: Iterable[Any]) -> None:
        """Take all batches; the clock of the epoch runs from the first to the last of them."""
        n, begin_s = 0, 0.0
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
        """Do the job with a contender's functions, once its imports are done.

        make: writes its data. build: its loader; batches: what that gives out; state: its state at the resume step;
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
        """Tell the parent, and end without any clean-up but the interpreter's own."""
        self._answers.write(json.dumps(self.notes) + "\n")
        self._answers.flush()

    def _memory(self) -> None:
        now = memory()
        self.notes["resident_bytes"] = now["resident"] - self._bare["resident"]
        self.notes["private_bytes"] = now["private"] - self._bare["private"]
        self.notes["peak_bytes"] = now["peak"] - self._bare["resident"]


def grouped(rows: Iterable[Any], n: int, join: Any) -> Iterable[Any]:
    """Rows [L] -> batches: lists of ``n``, joined."""
    held = []
    for row in rows:
        held.append(row)
        if len(held) == n:
            yield join(held)
            held = []
    if held:
        yield join(held)


def rows_digest(batches: Iterable[Any]) -> tuple[int, int]:
    """Number of rows, and a sum over them that no order changes and that a changed, lost or repeated row changes."""
    import numpy as np

    n, total = 0, np.uint64(0)
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
