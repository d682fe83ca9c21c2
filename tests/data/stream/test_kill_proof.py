"""Proof: a stream that is killed at any moment starts again at once, for two users at a time, and leaves nothing."""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from random_tokens import write_source

pytestmark = pytest.mark.slow

READER = """
import os, sys
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.sources.readers import smalti
from smalti.data.stream.stream import Stream
from smalti.data.tokens import reader

root, first, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if uid:  # from here on another user, who need not be able to read the interpreter's own folder
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
stages = [{"until": "0.5run", "weights": {"code": 1, "prose": 2}}, {"weights": {"code": 1}, "seq_len": 32}]
data = DataConfig(sources={name: f"{root}/{name}" for name in ("code", "prose")}, seq_len=16, stages=stages)
stream = Stream(data, seed=17, length=RunLength(1000, ((0, 320),)), rank=1, world_size=2, microbatch_tokens=64)
tokens = b"".join(batch.tokens.tobytes() for batch in stream.batch(first))
shared = [line for line in open("/proc/self/maps") if "/dev/shm" in line] if sys.platform == "linux" else []
print(hash(tokens), len(shared), flush=True)
while True:
    for step in range(first, 1000):
        stream.batch(step)
"""
START_S = 60.0
"""A start that takes longer hangs; on an idle machine it takes half a second, most of it Python and numpy."""


class User:
    """A user with a home and a temporary folder; with another uid if the test may set it."""

    def __init__(self, folder: Path, uid: int | None) -> None:
        self.uid, self.folders = uid, [folder / "home", folder / "tmp"]
        for one in self.folders:
            one.mkdir(parents=True)
            if uid is not None:
                os.chown(one, uid, uid)
        home, temporary = map(str, self.folders)
        self.environment = {**os.environ, "HOME": home, "TMPDIR": temporary, "PYTHONHASHSEED": "0"}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"

    def start(self, root: Path, step: int) -> "subprocess.Popen[str]":
        """A process that reads the stream from ``step`` on until it is killed."""
        return subprocess.Popen(
            [sys.executable, "-c", READER, str(root), str(step), str(self.uid or 0)],
            env=self.environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Files of this user in temporary folders; in /dev/shm only if the uid identifies them."""
        found = [str(path) for folder in self.folders for path in folder.rglob("*")]
        if self.uid is not None and Path("/dev/shm").exists():
            found += [entry.path for entry in os.scandir("/dev/shm") if entry.stat().st_uid == self.uid]
        return found


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="smalti-kill-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_kill_and_start_again_for_two_users_at_once(shared_folder: Path, proof: Any, record: Any) -> None:
    for seed, name in enumerate(("code", "prose")):
        write_source(shared_folder / "data" / name, 60, seed=seed)
    for path in (shared_folder / "data").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    uids = (60_001, 60_002) if os.geteuid() == 0 else (None, None)
    users = [User(shared_folder / f"user{number}", uid) for number, uid in enumerate(uids)]
    n_kills, rng = proof(short=3, full=100), np.random.default_rng(6)
    tokens: dict[int, str] = {}
    starts, slowest_s = 0, 0.0
    for _ in range(n_kills):
        step = int(rng.integers(0, 3)) * 300
        began_s = time.monotonic()
        processes = [user.start(shared_folder / "data", step) for user in users]
        try:
            if rng.random() < 0.3:  # in the middle of a start; the next turn shows that it does no harm
                time.sleep(float(rng.uniform(0, 0.3)))
                _kill(processes)
                processes = [user.start(shared_folder / "data", step) for user in users]
                began_s = time.monotonic()
            for process in processes:
                told, shared = _first_line(process).split()
                assert tokens.setdefault(step, told) == told, "other tokens than at the start before"
                assert shared == "0", "the stream maps shared memory"
                starts += 1
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            time.sleep(float(rng.uniform(0, 0.1)))
        finally:
            _kill(processes)
    assert starts == 2 * n_kills
    for user in users:
        assert user.left() == []
    assert sorted(path.name for path in (shared_folder / "data").iterdir()) == ["code", "prose"]
    record("stream_kill", {"kills_of_each": n_kills, "starts_of_both": starts, "failed": 0, "left_behind": 0,
                           "two_uids": uids[0] is not None, "slowest_start_s": round(slowest_s, 2)})  # fmt: skip


def _first_line(process: "subprocess.Popen[str]") -> str:
    """The output of the process after its first batch."""
    out: IO[str] | None = process.stdout
    assert out is not None
    assert process.stderr is not None
    ready, _, _ = select.select([out], [], [], START_S)
    line = out.readline() if ready else ""
    if not line:
        process.kill()
        raise AssertionError(f"no first batch: {process.stderr.read()[-2000:]}")
    return line


def _kill(processes: "list[subprocess.Popen[str]]") -> None:
    """kill -9, all at once."""
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
