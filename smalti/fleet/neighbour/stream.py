"""Connections between agents, and an agent and a holder: authenticated, with time limits; and copies sent over them.

Both sides prove with HMAC-SHA256 that they have the same key, the one that accepts first, each over its role and the
random numbers of both: a process without the key gets no proof that another connection would take. Later messages are
neither encrypted nor signed: who is on the path of a connection can read and change them.
Messages are JSON and files are bytes: nothing that is received is unpickled.
"""

import errno
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from smalti.base import log
from smalti.base.errors import DataError
from smalti.track.checkpoints import manifest

_PIECE_BYTES = 8 << 20
_MESSAGE_BYTES = 4 << 20
_SILENCE_S = 60.0
"""A side that neither sends nor receives for so long is lost."""
_UNPROVED = 64
"""Connections at once of which it is not known yet whether they have the key; more wait."""
_PAUSE_S = 1.0
"""After an error of the system, such as too many open files."""
_NONCE_BYTES = _PROOF_BYTES = 32

Message = dict[str, Any]


def connect(host: str, port: int, key: bytes, timeout_s: float = 10.0, silence_s: float = _SILENCE_S) -> Connection:
    """Return a connection to a holder that has the same key. Raises OSError, AuthenticationError, EOFError.

    silence_s: the other side is lost if it neither sends nor receives for so long.
    """
    connection = _opened(socket.create_connection((host, port), timeout=timeout_s), silence_s)
    try:
        nonces = os.urandom(_NONCE_BYTES)
        connection.send_bytes(nonces)
        nonces += _receive(connection, _NONCE_BYTES)
        _require_proof(connection, key, b"server", nonces)
        connection.send_bytes(_proof(key, b"client", nonces))  # only to a server that has the key
    except BaseException:
        connection.close()
        raise
    return connection


def accept(accepted: socket.socket, key: bytes, silence_s: float = _SILENCE_S) -> Connection:
    """Return the connection of an agent that has the same key. Raises OSError, AuthenticationError, EOFError."""
    connection = _opened(accepted, silence_s)
    try:
        nonce = os.urandom(_NONCE_BYTES)
        nonces = _receive(connection, _NONCE_BYTES) + nonce
        connection.send_bytes(nonce)
        connection.send_bytes(_proof(key, b"server", nonces))
        _require_proof(connection, key, b"client", nonces)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return the proof of one side. nonces: of the client and of the server."""
    return hmac.digest(key, b"smalti " + role + nonces, "sha256")


def _require_proof(connection: Connection, key: bytes, role: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES), _proof(key, role, nonces)):
        raise AuthenticationError("the other side has another key")


def _receive(connection: Connection, size: int) -> bytes:
    received = connection.recv_bytes(size)
    if len(received) != size:
        raise AuthenticationError(f"{len(received)} bytes were received in place of {size}")
    return received


def serve(
    listener: socket.socket, key: bytes, answer: Callable[[Connection, str], None], silence_s: float = _SILENCE_S
) -> None:
    """Call ``answer`` with each connection of an agent that has the same key, and its host, until the listener ends.

    Each call is in a thread; where it raises ``LOST``, that is a warning.
    """
    unproved = threading.BoundedSemaphore(_UNPROVED)

    def answer_one(accepted: socket.socket, host: str) -> None:
        try:
            try:
                connection = accept(accepted, key, silence_s)
            finally:
                unproved.release()
            with connection:
                answer(connection, host)
        except EOFError:
            log.get("fleet").warning("%s has closed its connection: it may have another SMALTI_PEER_KEY", host)
        except LOST as error:
            log.get("fleet").warning("%s: %s: %s", host, type(error).__name__, error)

    while True:
        try:
            accepted, (host, *_) = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in (errno.EINVAL, errno.EBADF):  # closed, or shut down to be closed
                return
            log.get("fleet").warning("no connection can be accepted: %s", error)
            time.sleep(_PAUSE_S)
            continue
        unproved.acquire()
        threading.Thread(target=answer_one, args=(accepted, host), daemon=True).start()


def end_listening(listener: socket.socket) -> None:
    """Close a listener; a thread that waits for a connection gets an OSError, which ``close`` alone would not do."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _opened(connected: socket.socket, silence_s: float) -> Connection:
    connected.settimeout(None)  # the kernel's limits hold for each read and write of the descriptor
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6)))
    return Connection(connected.detach())


LOST = (OSError, EOFError, AuthenticationError, ValueError, KeyError, TypeError)
"""What a connection raises whose other side is lost, has another key or sends something else."""


def send_message(connection: Connection, message: Message) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps(message).encode())


def receive_message(connection: Connection) -> Message:
    """Receive a message. Raises DataError with the reason of the other side where it refuses."""
    message: Message = json.loads(connection.recv_bytes(_MESSAGE_BYTES))
    if "refused" in message:
        raise DataError(str(message["refused"]))
    return message


@contextmanager
def opened_files(root: Path) -> Iterator[dict[str, IO[bytes]]]:
    """Open all files of a complete copy, ``COMPLETE`` last, so that it may be deleted while it is sent.

    Raises FileNotFoundError where it is deleted already.
    """
    entries, reason = manifest.listed(root)
    if reason is not None:
        raise FileNotFoundError(f"{root}: {reason}")
    with ExitStack() as files:
        names = [*(str(entry["name"]) for entry in entries), "manifest.json", "COMPLETE"]
        yield {name: files.enter_context(open(root / name, "rb")) for name in names}


def sizes(files: dict[str, IO[bytes]]) -> list[tuple[str, int]]:
    """Return the name and size of each file."""
    return [(name, file.seek(0, 2)) for name, file in files.items()]


def send_files(connection: Connection, files: dict[str, IO[bytes]]) -> None:
    """Send the bytes of files, one after the other."""
    for file in files.values():
        file.seek(0)
        while piece := file.read(_PIECE_BYTES):
            connection.send_bytes(piece)


def receive_files(connection: Connection, root: Path, listed: list[tuple[str, int]]) -> None:
    """Write files of these names and sizes below an empty folder. Raises DataError for a name that is not below it."""
    for name, size in listed:
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise DataError(f"{name!r} is no file of a checkpoint")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            while file.tell() < size:
                file.write(connection.recv_bytes(min(_PIECE_BYTES, size - file.tell())))
