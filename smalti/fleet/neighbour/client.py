"""The agent's side: fetches the newest copy of a run from another node at its start, and sends new ones there."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from smalti.base import log
from smalti.base.env import peer_key
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.identity import difference
from smalti.config.load import load_text
from smalti.config.run import RunConfig
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import LOST
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import complete, folder_name, step_of
from smalti.track.run import RunFolder, config_text

_LOOK_S = 0.1
_PAUSE_S = 5.0
"""After a copy that could not be sent."""


@contextmanager
def neighbour(config: RunConfig, folder: RunFolder, memory: Path | None) -> Iterator[None]:
    """Context manager: fetches a copy that is newer than the run folder's into ``memory``, and then sends new ones.

    Does nothing without ``train.checkpoint.peer_node``. Raises RetryableError where that node does not answer at the
    start, because it may hold the only copy; later that is a warning. The copy of a run that is done is deleted.
    """
    address = config.train.checkpoint.peer_node
    if address is None or memory is None:
        yield
        return
    peer = Neighbour(address, config)
    saved = folder.saved_step()
    try:
        fetched = peer.fetch(memory, newer_than=-1 if saved is None else saved)
    except (DataError, *LOST) as error:
        raise RetryableError(
            f"train.checkpoint.peer_node={address} was not asked for a copy of the run: {_reason(error)}",
            hint="run 'smalti fleet hold' there with the same SMALTI_PEER_KEY, or remove train.checkpoint.peer_node",
        ) from error
    if fetched is not None:
        log.get("fleet").info("the copy of step %d was fetched from %s", step_of(fetched), address)
    stop = threading.Event()
    sender = threading.Thread(target=peer.send_new, args=(memory, stop), name="neighbour", daemon=True)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join(_LOOK_S * 3)  # one that sends is not waited for
    if folder.saved_step() == config.length.total_steps:
        peer.try_to(peer.drop)


class Neighbour:
    """The node that holds copies of a run."""

    def __init__(self, address: str, config: RunConfig) -> None:
        """Raises UserError without ``SMALTI_PEER_KEY``."""
        self.address, self._config = address, config
        host, _, port = address.rpartition(":")
        self._place = host.strip("[]"), int(port)
        self._failure: str | None = None
        key = peer_key()
        if key is None:
            raise UserError(
                f"train.checkpoint.peer_node={address} needs the key of 'smalti fleet hold' there",
                hint="export SMALTI_PEER_KEY=...",
            )
        self._key = key.encode()

    def fetch(self, memory: Path, *, newer_than: int) -> Path | None:
        """Fetch the copy into ``memory`` if it is newer and of this run, and return its path there. Raises ``LOST``.

        Raises DataError where it does not match its digests.
        """
        with self._connect("get") as connection:
            offer = stream.receive_message(connection)
            if offer["step"] is None or int(offer["step"]) <= newer_than or not self._is_of_run(offer["config"]):
                return None
            final = memory / folder_name(int(offer["step"]))
            temporary = final.with_name(f".{final.name}.fetching")
            try:
                temporary.mkdir()
                stream.send_message(connection, {})
                stream.receive_files(connection, temporary, [(str(name), int(size)) for name, size in offer["files"]])
                reason = manifest.fault(temporary)
                if reason is not None:
                    raise DataError(f"the copy of step {step_of(final)} is not what was sent: {reason}")
                os.replace(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            return final

    def _is_of_run(self, text: str) -> bool:
        stored = load_text(type(self._config), text, f"config.yaml on {self.address}").config
        lines = difference(stored, self._config)
        if lines:
            log.get("fleet").warning("the copy on %s is of another run: %s", self.address, "; ".join(lines))
        return not lines

    def send_new(self, memory: Path, stop: threading.Event) -> None:
        """Send each new copy of ``memory``, or the newest where it takes longer than their interval, until ``stop``."""
        sent = next(iter(complete(memory)), None)
        while not stop.wait(_LOOK_S):
            newest = next(iter(complete(memory)), None)
            if newest is None or newest == sent:
                continue
            if self.try_to(lambda name=newest: self._send(memory / name)):  # type: ignore[misc]
                sent = newest
            else:
                stop.wait(_PAUSE_S)

    def try_to(self, do: Callable[[], None]) -> bool:
        """Return whether it succeeded; a failure is a warning, once where it repeats."""
        failure = None
        try:
            do()
        except FileNotFoundError:  # a newer copy has replaced it
            return False
        except (DataError, *LOST) as error:
            failure = _reason(error)
        if failure is not None and failure != self._failure:
            log.get("fleet").warning("%s does not hold the newest copy: %s", self.address, failure)
        self._failure = failure
        return failure is None

    def _send(self, root: Path) -> None:
        with stream.opened_files(root) as files:
            config = config_text(self._config)
            with self._connect("put", step=step_of(root), config=config, files=stream.sizes(files)) as connection:
                stream.receive_message(connection)
                stream.send_files(connection, files)
                stream.receive_message(connection)

    def drop(self) -> None:
        """Delete the copy."""
        with self._connect("drop") as connection:
            stream.receive_message(connection)

    @contextmanager
    def _connect(self, do: str, **fields: object) -> Iterator[Connection]:
        with stream.connect(*self._place, self._key) as connection:
            stream.send_message(connection, {"do": do, "run": self._config.name, **fields})
            yield connection


def _reason(error: BaseException) -> str:
    return error.message if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
