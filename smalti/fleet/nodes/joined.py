"""``smalti fleet join``: the agent of a node whose ranks the lead of a run starts, watches and ends."""

import base64
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from sys import executable
from typing import Any

from smalti import __version__
from smalti.base import clock, log
from smalti.base.env import peer_key
from smalti.base.errors import DataError, SmaltiError, UserError
from smalti.base.units import format_seconds
from smalti.fleet.agent import health
from smalti.fleet.agent.evidence import look
from smalti.fleet.agent.memory import free_bytes, owned_folder, remove_leftovers
from smalti.fleet.agent.requests import StopRequests
from smalti.fleet.launch.local import LocalRank, start
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import LOST, Message
from smalti.fleet.nodes.answers import Answers
from smalti.fleet.nodes.copies import Copies
from smalti.fleet.nodes.lead import BEAT_S
from smalti.track.progress import slot_file
from smalti.track.run import RunFolder

_POLL_S = 0.1
_RETRY_S = 1.0
_CONNECT_S = 5.0
_KILL_S = 0.05


def join(addresses: Sequence[str], name: str, *, once: bool) -> int:
    """Serve one run after the other whose lead is at one of these addresses, until a stop is requested; the exit code.

    once: until the end of the first run, whose exit code it is. Raises UserError where a lead has another key.
    """
    key = peer_key()
    if key is None:
        raise UserError("a node joins only a run that has the same key", hint="export SMALTI_PEER_KEY=...")
    remove_leftovers()
    messages: dict[str, str] = {}
    with StopRequests() as requests:
        while not requests.any:
            for address in addresses:
                try:
                    code = _serve(address, name, key.encode(), requests)
                except (DataError, *LOST) as error:
                    if isinstance(error, AuthenticationError):
                        raise UserError(
                            f"the lead at {address} has another SMALTI_PEER_KEY", hint="export SMALTI_PEER_KEY=..."
                        ) from error
                    reason = error.message if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
                    if messages.get(address) != reason:
                        log.get("fleet").info("%s: %s; trying again", address, reason)
                    messages[address] = reason
                    continue
                messages.pop(address, None)
                if once and code is not None:
                    return code
            _pause(_RETRY_S, requests)
        return 128 + (signal.SIGINT if requests.interrupts else signal.SIGTERM)


def _serve(address: str, name: str, key: bytes, requests: StopRequests) -> int | None:
    """Join the run of a lead; its exit code when it has ended, None where a stop was requested. Raises ``LOST``."""
    host, _, port = address.rpartition(":")
    with stream.connect(host, int(port), key, _CONNECT_S, _CONNECT_S) as connection:
        stream.send_message(connection, {"join": name, "smalti": __version__, "free_bytes": free_bytes()})
        welcome = stream.receive_message(connection)
        print(f"{name} has joined {welcome['run']} at {address}", flush=True)
        with _copies(connection, key, int(welcome["memory_bytes"])) as copies:
            session = _Session(connection, float(welcome["lease_s"]), requests, copies)
            try:
                code = session.run()
            finally:
                session.close()
    print(f"{welcome['run']} at {address} has ended" if code is not None else f"{name} leaves", flush=True)
    return code


@contextmanager
def _copies(connection: Connection, key: bytes, needed_bytes: int) -> Iterator[Copies | None]:
    """Context manager: the copies in memory of this node, until the lead is lost; None where the run has none."""
    if not needed_bytes:
        yield None
        return
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as shared:
        host = shared.getsockname()[0]
    with owned_folder() as folder:
        copies = Copies(folder, key, host)
        try:
            yield copies
        finally:
            copies.close()


class _Session:
    """A connection to a lead, and the ranks that it has started here."""

    def __init__(self, connection: Connection, lease_s: float, requests: StopRequests, copies: Copies | None) -> None:
        self._copies = copies
        self._connection, self._lease_s, self._requests = connection, lease_s, requests
        self._ranks: list[LocalRank] = []
        self._number = 0
        """Of the start of these ranks."""
        self._slots_file: Path | None = None
        self._slots = b""
        self._ended = threading.Event()
        self._answers = Answers()
        threading.Thread(target=self._read_slots, name="slots", daemon=True).start()
        self._sent_copies: Message = {}
        self._reported: object = None
        self._reported_s = 0.0

    def run(self) -> int | None:
        """Carry out the requests of the lead until the run has ended (its exit code) or this node is to stop.

        Raises ``LOST``.
        """
        received_s = clock.now_s()
        while not self._may_stop():
            if self._connection.poll(_POLL_S):
                message = stream.receive_message(self._connection)
                received_s = clock.now_s()
                if message["do"] == "end":
                    return int(message["code"])
                self._do(message)
            elif clock.now_s() - received_s > self._lease_s:
                raise TimeoutError(f"the lead was silent for {format_seconds(self._lease_s)}")
            self._report()
        self._report(at_once=True)  # it leaves, and is not lost
        return None

    def close(self) -> None:
        """End the ranks and the session."""
        self._ended.set()
        self._kill()

    def _read_slots(self) -> None:
        """Read the progress of the ranks; the run folder may be silent for longer than the lease."""
        while not self._ended.wait(BEAT_S / 2):
            file = self._slots_file
            if file is not None:
                with suppress(OSError):  # no rank has opened it yet
                    slots = file.read_bytes()
                    if file == self._slots_file:
                        self._slots = slots

    def _kill(self) -> None:
        """Kill the ranks, and wait for their end."""
        for rank in self._ranks:
            rank.kill()
        while any(rank.code is None for rank in self._ranks):
            time.sleep(_KILL_S)
        self._ranks = []

    def _may_stop(self) -> bool:
        """Return whether a stop was requested, and the lead has ended the ranks or need not be waited for."""
        if self._requests.interrupts + self._requests.terminations > 1:
            return True
        return self._requests.any and all(rank.code is not None for rank in self._ranks)

    def _do(self, message: Message) -> None:
        if message["do"] == "start":
            try:
                self._start(message)
            except (SmaltiError, OSError) as error:
                why = error.message if isinstance(error, SmaltiError) else str(error)
                stream.send_message(self._connection, {"refused": f"its ranks cannot be started: {why}"})
        elif message["do"] == "copies":
            if self._copies is not None:
                self._copies.do(message["job"])
        elif message["do"] == "check":
            self._answers.start(message, partial(self._run_check, message))
        elif message["do"] == "look":
            ranks, folder = list(self._ranks), self._slots_file and self._slots_file.parent
            self._answers.start(message, lambda: look(ranks, folder)._asdict() if folder else {})
        elif message["do"] != "beat" and message["start"] == self._number:
            for rank in self._ranks[message["rank"] : message["rank"] + 1]:  # none where they could not be started
                rank.kill() if message["do"] == "kill" else rank.send(signal.Signals(message["signal"]))

    def _run_check(self, request: Message) -> Message:
        ended = self._ended.is_set
        code = health.run(request["command"], request["limit_s"], request["file"], ended, request["environment"])
        return {"code": code}

    def _start(self, message: Message) -> None:
        """Start ranks, when those of an earlier attempt are gone."""
        self._kill()
        self._number = message["start"]
        folder = RunFolder.join(message["folder"], message["attempt"])
        if not folder.log_folder().is_dir():
            raise DataError(f"{folder.log_folder()} does not exist here: all nodes must see the same run folder")
        os.chdir(message["cwd"])
        place: dict[str, Any] = {
            name: message[name] for name in ("ranks", "threads", "attempt", "port", "first", "world_size", "address")
        }
        self._slots_file = slot_file(folder.log_folder(), place["first"] // place["ranks"])
        self._slots = b""
        memory = None if self._copies is None else self._copies.ranks
        self._ranks = start([executable, *message["command"]], log_of=folder.rank_log, memory=memory, **place)
        self._reported_s = 0.0

    def _report(self, *, at_once: bool = False) -> None:
        """Report to the lead, once a second and when a rank has ended or an answer or a job on the copies is done."""
        codes = [rank.code for rank in self._ranks]
        answer = self._answers.take()
        new, now_s = (codes, self._copies and self._copies.last_job), clock.now_s()
        at_once = at_once or answer is not None
        if not at_once and new == self._reported and now_s - self._reported_s < BEAT_S:
            return
        self._reported, self._reported_s = new, now_s
        report = {
            "start": self._number,
            "codes": codes,
            "pids": [rank.pid for rank in self._ranks],
            "stopped": [rank.is_stopped for rank in self._ranks],
            "slots": base64.b64encode(self._slots).decode(),
            "leaves": self._requests.any,
            "answer": answer,
            "copies": self._changed_copies(),
        }
        stream.send_message(self._connection, report)

    def _changed_copies(self) -> Message:
        """Return the report of the copies without what was sent before: it has the names of all files."""
        report = {} if self._copies is None else self._copies.report()
        changed = {name: value for name, value in report.items() if (name, value) not in self._sent_copies.items()}
        self._sent_copies = report
        return changed


def _pause(seconds: float, requests: StopRequests) -> None:
    end_s = clock.now_s() + seconds
    while clock.now_s() < end_s and not requests.any:
        time.sleep(_POLL_S)
