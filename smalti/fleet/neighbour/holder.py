"""``smalti fleet hold``: keeps the newest copy of each run that sends one, in shared memory.

A copy is complete when its digests match what was received; until then the one before remains, so a run takes twice the
bytes of a copy. What would not fit is refused.
"""

import itertools
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from smalti.base import log, store
from smalti.base.env import peer_key
from smalti.base.errors import DataError, SmaltiError, UserError
from smalti.base.units import format_bytes
from smalti.fleet.agent.memory import owned_folder, remove_leftovers
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import Message
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import complete, folder_name, step_of

_CONFIG = "config.yaml"
_NAME = re.compile(r"[\w-][\w.-]*")


@contextmanager
def hold(host: str, port: int) -> Iterator[str]:
    """Context manager: a holder at ``host:port``, whose address it gives; its memory is freed at the end.

    Raises UserError without ``SMALTI_PEER_KEY``, and for an address that is taken or not of this node."""
    key = peer_key()
    if key is None:
        raise UserError(
            "copies are held only for runs that have the same key",
            hint="export SMALTI_PEER_KEY=$(openssl rand -hex 32)",
        )
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be opened: {error.strerror}", hint="--port 0 for any free one, --host 0.0.0.0"
        ) from error
    remove_leftovers()
    with listener, owned_folder() as folder:
        threading.Thread(target=Holder(folder, key.encode()).serve, args=(listener,), daemon=True).start()
        yield f"{host}:{listener.getsockname()[1]}"


class Holder:
    """Holds copies below ``folder``, and answers agents that have the key."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder, self._key = folder, key
        self._numbers = itertools.count()
        self._change = threading.Lock()
        """Held while the copy of a run is replaced or opened."""

    def serve(self, listener: socket.socket) -> None:
        """Answer connections until the listener is closed."""
        stream.serve(listener, self._key, self._answer)

    def _answer(self, connection: Connection, host: str) -> None:
        request = stream.receive_message(connection)
        answers = {"put": self._put, "get": self._get, "drop": self._drop}
        try:
            answers[request["do"]](connection, self._of(request["run"]), request)
        except SmaltiError as error:
            log.get("fleet").warning("%s: %s", host, error.message)
            stream.send_message(connection, {"refused": error.message})

    def _of(self, run: str) -> Path:
        """Return the folder of a run."""
        if not _NAME.fullmatch(run):
            raise DataError(f"{run!r} is no name of a run")
        return self._folder / run

    def _put(self, connection: Connection, run: Path, request: Message) -> None:
        """Receive a copy, and delete the one before."""
        listed = [(str(name), int(size)) for name, size in request["files"]]
        needed, free = sum(size for _, size in listed), shutil.disk_usage(self._folder).free
        if needed > free:
            raise DataError(f"a copy of {format_bytes(needed)} does not fit: {format_bytes(free)} are free")
        stream.send_message(connection, {})
        final = run / folder_name(int(request["step"]))
        temporary = run / f".{final.name}.{next(self._numbers)}"
        try:
            temporary.mkdir(parents=True)
            stream.receive_files(connection, temporary, listed)
            reason = manifest.fault(temporary)
            if reason is not None or manifest.read_state(temporary)["step"] != step_of(final):
                raise DataError(f"the copy of step {step_of(final)} is not what was sent: {reason or 'another step'}")
            store.write_text(temporary / _CONFIG, str(request["config"]))
            with self._change:
                for name in complete(run):
                    shutil.rmtree(run / name)
                os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        log.get("fleet").info("%s: the copy of step %d, %s", run.name, step_of(final), format_bytes(needed))
        stream.send_message(connection, {})

    def _get(self, connection: Connection, run: Path, request: Message) -> None:
        """Send the copy, if there is one and the agent takes it."""
        with ExitStack() as opened:
            with self._change:
                root = next((run / name for name in complete(run)), None)
                if root is None:
                    stream.send_message(connection, {"step": None})
                    return
                files = opened.enter_context(stream.opened_files(root))
                config = store.read_text(root / _CONFIG)
            offer = {"step": step_of(root), "config": config, "files": stream.sizes(files)}
            stream.send_message(connection, offer)
            with suppress(EOFError):  # the agent has a newer one
                stream.receive_message(connection)
                stream.send_files(connection, files)

    def _drop(self, connection: Connection, run: Path, request: Message) -> None:
        """Delete the copy of a run that is done."""
        with self._change:
            shutil.rmtree(run, ignore_errors=True)
        stream.send_message(connection, {})
