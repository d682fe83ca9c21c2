"""Daft as the engine of the data room: how it is imported, where it runs, and how an error of a worker comes back.

Promises: an error of ours that is raised in a worker, on whichever machine, is raised here as it was; a worker that
failed makes the plan fail, also where the engine would swallow it. Only this module, ``curate/plan.py`` and
``dedup/plan.py`` know Daft; a new version of it is tried there first.
"""

import logging
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from smalti.base import errors, log, store
from smalti.base.disk import room
from smalti.base.env import quiet_daft
from smalti.base.errors import RetryableError, SmaltiError, UserError, missing_extra
from smalti.base.hashing import digest_json

T = TypeVar("T")

_OURS = {
    kind.__name__: kind for kind in (errors.UserError, errors.DataError, errors.CheckFailed, errors.RetryableError)
}


def daft_module(what: str = "smalti data") -> Any:
    """Daft, quiet; ``what`` needs it, for the error where it is not installed."""
    quiet_daft()
    try:
        import daft
    except ImportError as error:
        raise missing_extra("daft", "data", what, error) from error
    # Its engine logs every error that it raises too; the error is told once, by us.
    logging.getLogger("daft_local_execution").setLevel(logging.CRITICAL)
    return daft


def choose_runner(runner: str, address: str | None, what: str) -> None:
    """Let plans of this process run on Daft's own engine or on a Ray cluster. It can be chosen once in a process."""
    daft = daft_module(what)
    # Asking Daft for the type of a runner that is not set would guess, and asking for the runner would set one.
    present = daft.get_or_infer_runner_type() if daft.runners._get_runner() is not None else None
    if present == runner:
        return
    if present is not None:
        raise UserError(f"runner={runner}: this process has begun to work with '{present}'", hint="start a new process")
    if runner == "native":
        daft.set_runner_native()
        return
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "cluster", f"{what} on a cluster", error) from error
    try:
        if not ray.is_initialized():
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        daft.set_runner_ray(noop_if_initialized=True)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"the Ray cluster at '{address or 'this machine'}' cannot be used: {error}",
            allowed="host:port, ray://host:port, auto, or nothing for a Ray of its own",
            hint="start one with 'ray start --head', then ray_address=auto",
        ) from error


def _knock(address: str | None) -> None:
    """Raise at once where nobody listens: Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


# The engine's own writer says it in text alone.
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


@dataclass(frozen=True)
class Failures:
    """A folder that all workers see; an error in a worker is written there before it is raised into the engine."""

    folder: Path

    def telling(self, function: Callable[..., T]) -> Callable[..., T]:
        """``function`` for a worker."""
        folder = str(self.folder)

        def told(*arguments: Any) -> T:
            try:
                return function(*arguments)
            except Exception as error:
                write_failure(folder, error)
                raise

        return told

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Run a plan; what a worker wrote is raised in place of what the engine makes of it, or of its silence."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json"):
            old.unlink()
        try:
            yield
        except Exception as error:
            if isinstance(error, SmaltiError):
                raise
            raise self._first() or as_ours(error, self.folder) from error
        first = self._first()
        if first is not None:
            raise first

    def _first(self) -> Exception | None:
        found = sorted(self.folder.glob("*.json"))
        if not found:
            return None
        told = store.read_json(found[0])
        log.get("data").debug("in a worker: %s", told["traceback"])
        kind = _OURS.get(told["kind"])
        if kind is None:
            return RuntimeError(f"{told['kind']} in a worker: {told['message']}\n{told['traceback']}")
        return kind(told["message"], allowed=told["allowed"], hint=told["hint"])


def as_ours(error: Exception, folder: str | Path) -> Exception:
    """A full disk in our words, whoever noticed it, with the free bytes of the disk of ``folder``, where the work is
    done; any other error as it is."""
    if isinstance(error, SmaltiError):
        return error
    if any(sign in str(error) for sign in _DISK_FULL):
        return RetryableError(
            f"the disk is full: {error}; {room(folder)}", hint="free space there, then run the same command again"
        )
    if "ParquetError channel closed" in str(error):  # Daft 0.7.26 keeps to itself why it could not write
        return RetryableError(
            f"the engine could not write a Parquet file ({error}); {room(folder)}",
            hint="free space on the disk of output and work (it is probably full), then run the same command again",
        )
    return error


def write_failure(folder: str, error: Exception) -> None:
    """Put ``error`` where the driver finds it; of several, the first by name of the file is raised."""
    error = as_ours(error, folder)
    value = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "allowed": getattr(error, "allowed", None),
        "hint": getattr(error, "hint", None),
        "traceback": "".join(traceback.format_exception(error)),
    }
    name = f"{value['kind']}-{digest_json(value)[:16]}.json"
    store.write_json(store.join(folder, name), value)
