"""``python -m smalti.fleet.launch.remote``: what ssh starts on a host. It reads a request from its standard input.

``start``: a supervisor that runs the command of an attempt, detached from the connection, unless one was started.
``look``: whether that supervisor runs. Prints one JSON object. The request has the whole command, its environment and
folders, so that no shell reads them.

The supervisor writes ``state.json``, ``alive`` and ``exit.json`` to the folder of its attempt; ``ssh.py`` reads them. A
file ``stop`` there asks the command to stop, which saves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from smalti.base import clock, store
from smalti.base.processes import identity, is_running

Json = dict[str, Any]

_STOP_S = 180.0
"""A command that has not ended so long after a request to stop is killed."""
BEAT_S = 5.0
"""Between two changes of ``alive``."""
_POLL_S = 0.5


def main() -> None:
    """Do what the request asks for."""
    request = json.load(sys.stdin)
    folder, host = Path(request["folder"]), os.uname().nodename
    if not folder.is_dir():
        error = f"{folder} does not exist on {host}: SMALTI_HOME must be on a file system that all hosts share"
        print(json.dumps({"error": error}))
        return
    if request["verb"] == "start" and _claim(folder):
        _detach(folder, request)
    print(json.dumps({"running": _is_running(folder, host)}))


def _claim(folder: Path) -> bool:
    """Return whether this is the first start of the attempt."""
    try:
        os.close(os.open(folder / "claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _is_running(folder: Path, host: str) -> bool:
    """Return whether the supervisor of an attempt runs on this host."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return False
    return state["host"] == host and is_running(state["pid"], state["process"])


def _detach(folder: Path, request: Json) -> None:
    """Fork the supervisor, and return once it is recorded."""
    reader, writer = os.pipe()
    if os.fork() != 0:
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        return
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, target in enumerate((nothing, output, output)):
            os.dup2(target, number)
        state = {"host": os.uname().nodename, "pid": os.getpid(), "process": identity(os.getpid())}
        store.write_text(folder / "state.json", json.dumps(state))
        os.close(writer)
        _record(folder, _supervise(folder, request))
    except BaseException as error:
        _record(folder, {"code": None, "reason": f"it could not be started: {error}"})
    finally:
        os._exit(0)


def _supervise(folder: Path, request: Json) -> Json:
    """Run the command and return its exit code, and the seconds that it ran."""
    began_s = clock.now_s()
    if (folder / "stop").exists():
        return {"code": 128 + signal.SIGTERM, "run_s": 0.0, "reason": "stopped before it was started"}
    try:
        process = subprocess.Popen(
            request["command"], cwd=request["directory"], env=request["environment"], stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return {"code": 2, "run_s": 0.0, "reason": f"it could not be started: {error}"}
    stopped_s, beats, beat_s = None, 0, -BEAT_S
    while True:
        with suppress(subprocess.TimeoutExpired):
            return {"code": process.wait(timeout=_POLL_S), "run_s": clock.now_s() - began_s}
        with suppress(OSError):  # the file system is away; so is the command, then
            if clock.now_s() > beat_s + BEAT_S:
                beats, beat_s = beats + 1, clock.now_s()
                (folder / "alive").write_text(str(beats))
            if stopped_s is None and (folder / "stop").exists():
                stopped_s = clock.now_s()
                process.send_signal(signal.SIGTERM)
        if stopped_s is not None and clock.now_s() > stopped_s + _STOP_S:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _record(folder: Path, end: Json) -> None:
    """Record the end, and try again for as long as the disk is full or away."""
    while True:
        try:
            store.write_text(folder / "exit.json", json.dumps(end))
            return
        except Exception as error:
            print(f"the end of the attempt is not recorded yet: {error}", file=sys.stderr, flush=True)
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main()
