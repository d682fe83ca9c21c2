"""Imports Daft, chooses where it runs, and passes errors of its workers on.

Guarantees: a ``SmaltiError`` that is raised in a worker, on any machine, is raised in the driver unchanged; a worker
that fails makes the query fail, also where Daft would drop the error. Only this module, ``curate/queries.py`` and the
package ``dedup`` (``frames``, ``queries``, ``words``) use Daft; test a new version of it there first.
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

_ERROR_TYPES = {
    kind.__name__: kind for kind in (errors.UserError, errors.DataError, errors.CheckFailed, errors.RetryableError)
}


def daft_module(what: str = "smalti data") -> Any:
    """Import Daft with telemetry, progress bars and logs off. ``what`` (for the error): the feature that needs it."""
    quiet_daft()
    try:
        import daft
    except ImportError as error:
        raise missing_extra("daft", "data", what, error) from error
    # Daft logs every error that it also raises.
    logging.getLogger("daft_local_execution").setLevel(logging.CRITICAL)
    return daft


def choose_runner(runner: str, address: str | None, what: str) -> None:
    """Run the queries of this process on Daft's own engine (``native``) or on a Ray cluster.

    Raises UserError if another runner was chosen before in this process, or the cluster cannot be used.
    """
    daft = daft_module(what)
    # Without a runner get_or_infer_runner_type would guess one, and get_or_create_runner would set one.
    current = daft.get_or_infer_runner_type() if daft.runners._get_runner() is not None else None
    if current == runner:
        return
    if current is not None:
        raise UserError(f"runner={runner}: this process already uses '{current}'", hint="start a new process")
    if runner == "native":
        daft.set_runner_native()
        return
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "cluster", f"{what} on a cluster", error) from error
    try:
        if not ray.is_initialized():
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        daft.set_runner_ray(noop_if_initialized=True)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"the Ray cluster at '{address or 'this machine'}' cannot be used: {error}",
            allowed="host:port, ray://host:port, auto, or nothing for a Ray of its own",
            hint="start one with 'ray start --head', then ray_address=auto",
        ) from error


def _check_address(address: str | None) -> None:
    """Raise OSError at once if nothing listens at ``address``: Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


# Daft's writer raises this without an errno.
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


@dataclass(frozen=True)
class Failures:
    """A folder that all workers share; an error in a worker is written there before Daft gets it."""

    folder: Path

    def recording(self, function: Callable[..., T]) -> Callable[..., T]:
        """Wrap ``function`` for a worker, so that its errors are recorded."""
        folder = str(self.folder)

        def wrapped(*arguments: Any) -> T:
            try:
                return function(*arguments)
            except Exception as error:
                write_failure(folder, error)
                raise

        return wrapped

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Run a query; a recorded error is raised in place of the error that Daft raises, or if it raises none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json"):
            old.unlink()
        try:
            yield
        except Exception as error:
            if isinstance(error, SmaltiError):
                raise
            raise self._first() or as_smalti_error(error, self.folder) from error
        first = self._first()
        if first is not None:
            raise first

    def _first(self) -> Exception | None:
        paths = sorted(self.folder.glob("*.json"))
        if not paths:
            return None
        failure = store.read_json(paths[0])
        log.get("data").debug("in a worker: %s", failure["traceback"])
        kind = _ERROR_TYPES.get(failure["kind"])
        if kind is None:
            return RuntimeError(f"{failure['kind']} in a worker: {failure['message']}\n{failure['traceback']}")
        return kind(failure["message"], allowed=failure["allowed"], hint=failure["hint"])


def as_smalti_error(error: Exception, folder: str | Path) -> Exception:
    """Convert the errors of a full disk to RetryableError, with the free space of ``folder``; return others as is."""
    if isinstance(error, SmaltiError):
        return error
    if any(sign in str(error) for sign in _DISK_FULL):
        return RetryableError(
            f"the disk is full: {error}; {room(folder)}", hint="free space there, then run the same command again"
        )
    if "ParquetError channel closed" in str(error):  # Daft 0.7.26 does not say why it could not write
        return RetryableError(
            f"Daft could not write a Parquet file ({error}); {room(folder)}",
            hint="free space on the disk of output and work (it is probably full), then run the same command again",
        )
    return error


def write_failure(folder: str, error: Exception) -> None:
    """Write ``error`` into ``folder`` for the driver; of several, the first by file name is raised."""
    error = as_smalti_error(error, folder)
    value = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
        "allowed": getattr(error, "allowed", None),
        "hint": getattr(error, "hint", None),
        "traceback": "".join(traceback.format_exception(error)),
    }
    name = f"{value['kind']}-{digest_json(value)[:16]}.json"
    store.write_json(store.join(folder, name), value)
