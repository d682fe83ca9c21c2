"""The engine ``ssh``: ``python -m smalti.fleet.launch.ssh`` runs an attempt on another host, and has its exit code.

It reads the request of ``remote.py`` from its standard input. ssh only starts the attempt and is asked whether it still
runs; a connection that is lost changes nothing. Everything else goes through files in the folder of the run, which all
machines share. On SIGTERM it asks the attempt to stop.

An attempt whose end is not known is lost where its host says that it is gone, or where neither the host answers nor the
attempt shows a sign of life for ``_SILENT_S``; it then finds a request to stop if it still runs. No attempt begins
before the earlier ones of its run have ended, or are lost.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import smalti
from smalti.base import clock, store
from smalti.base.errors import ExitCode
from smalti.fleet.launch.remote import BEAT_S

Json = dict[str, Any]

_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-T")
_ASK_S = 60.0
_TRIES, _TRY_WAIT_S = 4, 5.0
_SILENT_S = 300.0
_LOOK_S = 6 * BEAT_S
"""Without a sign of life for so long the host is asked, and again each time."""
_POLL_S = 0.5
_OF_THIS_MACHINE = ("SSH_", "XDG_", "DBUS_", "DISPLAY", "HOSTNAME", "TMPDIR")
"""Beginnings of variables that another host does not get."""


class Unreachable(Exception):
    """ssh did not reach the host, or what it started there gave no answer."""


class Refused(Exception):
    """The host cannot run it, now or later."""


class Attempt:
    """An attempt on a host, seen through its folder. Its stop is requested by ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def end(self) -> Json | None:
        """How it ended; None: that is not recorded."""
        try:
            return dict(json.loads((self.folder / "exit.json").read_text()))
        except (OSError, ValueError):
            return None

    def stop(self) -> None:
        """Ask it to stop; it saves."""
        (self.folder / "stop").touch()

    def wait(self, host: str, options: Sequence[str], is_stopping: "Stopping") -> Json:
        """Return how it ended, once it has; or that it is lost, with code 75."""
        sign, since_s, looked_s = self._sign(), clock.now_s(), clock.now_s()
        while (end := self.end) is None:
            if is_stopping.asked:
                self.stop()
            if (new := self._sign()) != sign:
                sign, since_s, looked_s = new, clock.now_s(), clock.now_s()
            elif clock.now_s() > looked_s + _LOOK_S:
                looked_s = clock.now_s()
                reason = self._lost(host, options, clock.now_s() - since_s)
                if reason is not None and self.end is None:
                    self.stop()
                    return {"code": int(ExitCode.RETRY), "reason": reason}
            time.sleep(_POLL_S)
        return end

    def _sign(self) -> str | None:
        try:
            return (self.folder / "alive").read_text()
        except OSError:
            return None

    def _lost(self, host: str, options: Sequence[str], silent_s: float) -> str | None:
        try:
            answer = ask(host, options, {"verb": "look", "folder": str(self.folder)})
        except (Unreachable, Refused) as error:
            silent = f"{host} does not answer, and the run has shown no sign of life for {silent_s:.0f} s"
            return f"{silent}: {error}" if silent_s > _SILENT_S else None
        return None if answer["running"] else f"it was killed on {host}, or {host} was restarted"


class Stopping:
    """Whether this process was asked to stop."""

    asked = False

    def __call__(self, *_: object) -> None:
        """Remember the request."""
        self.asked = True


def main() -> int:
    """Run the attempt of the request; returns its exit code."""
    stopping = Stopping()
    signal.signal(signal.SIGTERM, stopping)
    request = json.load(sys.stdin)
    place, number, host, options = Path(request["place"]), request["number"], request["host"], request["options"]
    for earlier in range(number):
        _end_earlier(place, earlier, options, stopping)
    attempt = Attempt(folder_of(place, number))
    attempt.folder.mkdir(parents=True, exist_ok=True)
    store.write_text(attempt.folder / "host", host)
    if stopping.asked:
        return ExitCode.TERMINATED
    try:
        _start(host, options, {**request["remote"], "verb": "start", "folder": str(attempt.folder)}, stopping)
    except Unreachable as error:
        if not (attempt.folder / "claim").exists():
            attempt.stop()  # if the request reaches the host after all
            (attempt.folder / "failed").write_text(f"{host} cannot be reached by ssh: {error}")
            return ExitCode.RETRY
    except Refused as error:
        (attempt.folder / "failed").write_text(str(error))
        return ExitCode.USAGE
    return _ended(attempt, attempt.wait(host, options, stopping))


def _end_earlier(place: Path, number: int, options: Sequence[str], stopping: Stopping) -> None:
    """Wait until an earlier attempt of the run has ended, which is asked to stop."""
    earlier = Attempt(folder_of(place, number))
    if (earlier.folder / "claim").exists() and earlier.end is None and not (earlier.folder / "lost").exists():
        earlier.stop()
        earlier.wait((earlier.folder / "host").read_text(), options, stopping)


def _start(host: str, options: Sequence[str], request: Json, stopping: Stopping) -> None:
    for number in range(_TRIES):
        try:
            ask(host, options, request)
            return
        except Unreachable:
            if number + 1 == _TRIES or stopping.asked:
                raise
        time.sleep(_TRY_WAIT_S)


def _ended(attempt: Attempt, end: Json) -> int:
    """Record why the attempt ended, and return its exit code; one that was killed by a signal has its negative."""
    if attempt.end is None:
        (attempt.folder / "lost").write_text(str(end["reason"]))
    code = end["code"]
    return int(ExitCode.RETRY) if code is None else 128 - code if code < 0 else int(code)


def ask(host: str, options: Sequence[str], request: Json) -> Json:
    """Return the answer of ``remote.py`` on a host. Raises Unreachable and Refused.

    The remote shell gets three words that no run can change: the package's folder, Python, and the module.
    """
    package = Path(smalti.__file__).parent.parent
    remote = shlex.join(["env", f"PYTHONPATH={package}", sys.executable, "-m", "smalti.fleet.launch.remote"])
    command = ["ssh", *_OPTIONS, *options, "--", host, remote]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_ASK_S, check=False
        )
        answer = dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise Unreachable(f"no answer within {_ASK_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(str(error)) from error
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        raise Unreachable(lines[-1][:300] if lines else f"ssh ended with code {done.returncode}") from None
    if "error" in answer:
        raise Refused(answer["error"])
    return answer


def request_of(
    place: Path,
    number: int,
    host: str,
    options: Sequence[str],
    *,
    command: Sequence[str],
    directory: str,
    output: Path,
    environment: Mapping[str, str],
) -> str:
    """Return the request of attempt ``number`` of the run of a ``place``, for the standard input of this module."""
    remote = {
        "command": list(command),
        "directory": directory,
        "output": str(output),
        "environment": {name: value for name, value in environment.items() if not name.startswith(_OF_THIS_MACHINE)},
    }
    request = {"place": str(place), "number": number, "host": host, "options": list(options), "remote": remote}
    return json.dumps(request)


def folder_of(place: Path, number: int) -> Path:
    """Return the folder of an attempt, in that of its run."""
    return place / f"ssh-{number}"


def end_of(place: Path, number: int, code: int) -> tuple[int, str | None]:
    """Return the exit code of an attempt, minus the signal that killed it, and the reason where one is known."""
    attempt = Attempt(folder_of(place, number))
    end = attempt.end
    if end is not None and end["code"] is not None:
        return int(end["code"]), end.get("reason")
    if end is not None:
        return code, str(end["reason"])
    reasons = [file.read_text() for name in ("lost", "failed") if (file := attempt.folder / name).exists()]
    return code, reasons[0] if reasons else None


if __name__ == "__main__":
    sys.exit(main())
