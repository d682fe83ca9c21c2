"""Virtual environments for the programs that Smalti is compared with, one for each name.

    PYTHONPATH=tools .venv/bin/python -c 'import peers; print(peers.python_of("train"))'

A benchmark starts its peers with the interpreter that ``python_of`` returns. ``bench/peers/NAME.txt`` pins their
packages; torch is that of ``constraints.txt``. The first use installs with pip and PIP_ARGS; a changed list installs
again. An incomplete environment is not used, and of two concurrent processes one waits.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "bench" / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"


def python_of(name: str) -> Path:
    """Return the interpreter of ``.venv-peers/NAME``; creates the environment if it is absent or out of date.

    Raises FileNotFoundError for a name without pins, RuntimeError where pip fails (pip has then said why).
    """
    pins = PINS / f"{name}.txt"
    if not pins.is_file():
        known = ", ".join(sorted(path.stem for path in PINS.glob("*.txt")))
        raise FileNotFoundError(f"no environment '{name}': {pins} does not exist (there are: {known})")
    torch = _torch_pin()
    key = hashlib.sha256(f"{sys.version}\n{torch}\n{pins.read_text()}".encode()).hexdigest()
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.is_file() and stamp.read_text() == key):
            print(f"installing {pins.relative_to(ROOT)} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
            _install(folder, python, pins, torch)
            stamp.write_text(key)
    return python


def _install(folder: Path, python: Path, pins: Path, torch: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    constraint = folder / "torch.txt"
    constraint.write_text(f"{torch}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _run([*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), "-c", str(constraint), "-r", str(pins)])


def _torch_pin() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, check=False, cwd=ROOT)  # pins may name folders below it
    if done.returncode != 0:
        raise RuntimeError(
            f"'{shlex.join(command)}' failed with {done.returncode}; hint: PIP_ARGS holds more arguments for pip"
        )
