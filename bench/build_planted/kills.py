"""Builds that are killed at random moments of their lives, and the bytes of what they write in the end."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_PER_LIFE = 4
"""Kills of a build before it may finish: each run continues where the one before was killed."""


def command(recipe: Path, *changes: str) -> list[str]:
    """Return the one command."""
    return [sys.executable, "-m", "smalti", "data", "build", str(recipe), *changes]


def digests(output: Path) -> dict[str, str]:
    """Return file -> digest, for the documents and the drops."""
    return {
        path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in ("documents", "drops")
        for path in sorted((output / name).rglob("*"))
        if path.is_file()
    }


def killed(recipe: Path, folder: Path, n: int, seconds: float, seed: int) -> tuple[int, list[float], list[Path]]:
    """Kill builds ``n`` times in all; returns the kills that hit a running build, their moments, and the outputs.

    seconds: of an undisturbed build, of which each moment is a random share.
    """
    rng = random.Random(seed)
    outputs: list[Path] = []
    moments: list[float] = []
    while len(moments) < n:
        number = len(outputs)
        output = folder / f"killed-{number}"
        changes = (f"output={output}", f"work={folder / f'work-{number}'}", "workers=2")
        for _ in range(min(_PER_LIFE, n - len(moments))):
            moment = rng.uniform(0.02, 0.9) * seconds
            process = subprocess.Popen(
                command(recipe, *changes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            try:
                process.wait(moment)
                break  # it finished before: a life has fewer kills then
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                moments.append(moment)
        subprocess.run(command(recipe, *changes), check=True, capture_output=True)
        outputs.append(output)
    return len(moments), moments, outputs


def undisturbed(recipe: Path, output: Path, work: Path, workers: int) -> float:
    """Build once; returns the seconds. RuntimeError with the end of its output if it fails."""
    started = time.monotonic()
    changes = (f"output={output}", f"work={work}", f"workers={workers}")
    done = subprocess.run(command(recipe, *changes), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"smalti data build ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return time.monotonic() - started
