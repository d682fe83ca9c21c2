"""The lead's side: accepts the agents of other nodes, and starts the ranks of an attempt on them."""

import base64
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from smalti import __version__
from smalti.base import clock, log
from smalti.base.env import peer_key
from smalti.base.errors import DataError, ExitCode, SmaltiError, UserError
from smalti.base.units import format_bytes, format_seconds
from smalti.config.durations import to_seconds
from smalti.config.nodes import NodesConfig
from smalti.fleet.launch.local import Rank, free_port
from smalti.fleet.launch.local import start as start_here
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import LOST, Message
from smalti.fleet.nodes.copies import Copies
from smalti.fleet.nodes.replication import LocalNode, Replication
from smalti.track.progress import Progress, slots_in
from smalti.track.run import RunFolder

BEAT_S = 1.0
"""How often each side sends at least."""
_SILENT_S = 3.0
_POLL_S = 0.1


class Node:
    """A node that has joined."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.why: str | None = None
        """Why it was lost; None while it is there."""
        self.is_leaving = False
        """It is to be stopped: the run is to continue without it."""
        self.is_suspect = False
        """A rank on it keeps failing: others are chosen first."""
        self._connection = connection
        self._sending = threading.Lock()
        self._received_s = clock.now_s()
        self._lost_s: float | None = None
        self._status: Message = {}
        self._copies: Message = {}

    @property
    def silent_s(self) -> float:
        """Seconds since the last message from it; of one that was lost, until then."""
        return (self._lost_s or clock.now_s()) - self._received_s

    @property
    def is_lost(self) -> bool:
        """Whether it was lost."""
        return self.why is not None

    def report(self) -> Message:
        """Return what it has reported about its copies in memory (``Copies.report``)."""
        return self._copies

    def do(self, job: Message) -> None:
        """Begin a job on its copies (``Copies.do``)."""
        self.send({"do": "copies", "job": job})

    def status(self, number: int) -> Message:
        """Return what it has reported about the ranks of this start; empty before."""
        status = self._status
        return status if status.get("start") == number else {}

    def listen(self, lease_s: float) -> None:
        """Receive its reports until it is lost."""
        try:
            while True:
                message = stream.receive_message(self._connection)
                self._received_s = clock.now_s()
                self.is_leaving = self.is_leaving or bool(message.get("leaves"))
                self._copies = {**self._copies, **message.get("copies", {})}  # only what has changed is sent
                self._status = message
        except BlockingIOError:
            self.lose(f"it was silent for {format_seconds(lease_s)}")
        except DataError as error:
            self.lose(error.message)
        except LOST as error:
            self.lose(f"its agent ended, or the connection broke ({type(error).__name__})")

    def lose(self, why: str) -> None:
        """Send and believe nothing more."""
        self._lost_s = self._lost_s or clock.now_s()
        self.why = self.why or why
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as shared:
            shared.shutdown(socket.SHUT_RDWR)  # ends a read of another thread too

    def send(self, message: Message) -> None:
        """Send a message; a failure is the loss of the node."""
        if self.why is not None:
            return
        try:
            with self._sending:
                stream.send_message(self._connection, message)
        except LOST as error:
            self.lose(f"nothing can be sent to it: {error}")


@dataclass(kw_only=True)
class RemoteRank(Rank):
    """A rank that the agent of another node has started."""

    agent: Node
    number: int
    """Of the start."""
    index: int
    """Among the ranks of its node."""

    @property
    def pid(self) -> int:
        return int(self._of("pids") or 0)

    @property
    def code(self) -> int | None:
        code: int | None = self._of("codes")
        return -signal.SIGKILL if code is None and self.agent.why is not None else code

    @property
    def has_ended(self) -> bool:
        """Whether its end was reported."""
        return self._of("codes") is not None

    @property
    def is_stopped(self) -> bool:
        return bool(self._of("stopped"))

    def send(self, number: signal.Signals) -> None:
        self.agent.send({"do": "signal", "start": self.number, "rank": self.index, "signal": int(number)})

    def kill(self) -> None:
        self.killed_by_us = self.killed_by_us or self.code is None
        self.agent.send({"do": "kill", "start": self.number, "rank": self.index})

    def _of(self, name: str):  # type: ignore[no-untyped-def]
        values = self.agent.status(self.number).get(name)
        return None if values is None else values[self.index]


class Nodes:
    """The nodes of a run: this one, and those that have joined, of which some may be spares."""

    def __init__(
        self, config: NodesConfig, ranks: int, run: str, key: bytes, listener: socket.socket, memory_bytes: int = 0
    ) -> None:
        """ranks: of the run on all of its nodes. memory_bytes: for copies on each; 0: none."""
        self._memory_bytes = memory_bytes
        self._replication: Replication | None = None
        lease_s, wait_s = to_seconds(config.lease), to_seconds(config.wait)
        assert lease_s is not None and wait_s is not None
        self.name = os.uname().nodename
        self._address, self._ranks, self._run, self._key = config.listen, ranks, run, key
        self._host = config.listen.rpartition(":")[0]
        self._lease_s, self._wait_s = lease_s, wait_s
        self._each = ranks // config.count
        """Most ranks of a node."""
        self._joined: list[Node] = []
        self._used: list[Node] = []
        """The other nodes of the present attempt."""
        self._started: list[RemoteRank] = []
        self._number = 0
        self._change = threading.Lock()
        self._ended = threading.Event()
        serving = (listener, key, self._answer, lease_s)
        threading.Thread(target=stream.serve, args=serving, name="nodes", daemon=True).start()
        threading.Thread(target=self._beat, name="nodes-beat", daemon=True).start()

    # ---- the nodes that are there ----

    @property
    def room(self) -> int:
        """Ranks for which there are nodes."""
        return self._each * (1 + len(self._usable()))

    @property
    def all_there(self) -> bool:
        """Whether there are nodes for all ranks of the run."""
        return self.room >= self._ranks

    def use_memory(self, folder: Path | None) -> Path | None:
        """Exchange copies in memory from now on; returns the folder for those of the ranks of this node."""
        if folder is None:
            return None
        copies = Copies(folder, self._key, self._host)
        self._replication = Replication(LocalNode(self.name, copies))
        threading.Thread(target=self._replicate, args=(self._replication,), name="nodes-copies", daemon=True).start()
        return copies.ranks

    def local_ranks(self, ranks: int) -> int:
        """Return the ranks of each node, of so many."""
        return ranks // self._count(ranks)

    def divides(self, ranks: int) -> bool:
        """Return whether so many ranks are divided over nodes in equal parts."""
        return ranks % self._count(ranks) == 0

    def wait(
        self,
        ranks: int,
        fewer: Callable[[int], int | None] = lambda room: None,
        stops: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Wait until there are nodes for ``ranks``, and return that number.

        After a lease it may be what ``fewer`` returns for the ranks that there is room for. None after
        ``train.nodes.wait``, which is logged, or where the wait is to stop.
        """
        began_s, is_logged = clock.now_s(), False
        while not stops():
            room, waited_s = self.room, clock.now_s() - began_s
            if room >= ranks and self._choose(ranks):
                return ranks
            count = fewer(room) if waited_s >= self._lease_s else None
            if count is not None and self._choose(count):
                log.get("fleet").warning("continuing on %d of %d ranks: no node has joined", count, self._ranks)
                return count
            names, wanted = [self.name, *(node.name for node in self._usable())], self._count(ranks)
            joined = f"{len(names)} of {wanted} nodes {'has' if len(names) == 1 else 'have'} joined"
            joined, lacks = f"{joined} ({', '.join(names)})", wanted - len(names)
            if waited_s >= self._wait_s:
                text = "%s within %s; run 'smalti fleet join %s' on %d more"
                log.get("fleet").error(text, joined, format_seconds(self._wait_s), self._address, lacks)
                return None
            if not is_logged:
                log.get("fleet").info("%s; waiting for %d more at %s", joined, lacks, self._address)
                is_logged = True
            time.sleep(_POLL_S)
        return None

    # ---- an attempt ----

    def place(self, ranks: int) -> list[str]:
        """Return the names of the nodes of the next attempt, which ``wait`` has chosen. A spare replaces one that was
        lost since then; without a spare it ends the attempt at once (``lost``)."""
        self._choose(ranks)
        return [self.name, *(node.name for node in self._used)]

    def _choose(self, ranks: int) -> bool:
        """Choose the nodes of the next attempt, those of the one before first and suspect ones last; returns whether
        there are enough."""
        count = self._count(ranks) - 1
        chosen = sorted(self._usable(), key=lambda node: (node.is_suspect, node not in self._used))[:count]
        if len(chosen) < count:
            return False
        self._used = chosen
        return True

    def start(
        self,
        command: Sequence[str],
        folder: RunFolder,
        *,
        ranks: int,
        threads: int,
        memory: Path | None,
        stops: Callable[[], bool] = lambda: False,
    ) -> list[Rank]:
        """Start the ranks of an attempt on the nodes of ``place``, the first ones on this node.

        stops: whether copies in memory are waited for no longer; the ranks are started, and end on a signal.
        """
        assert folder.attempt is not None
        if self._replication is not None:
            others = [node for node in self._usable() if node not in self._used]
            self._replication.gather(self._used, others, stops)
        self._number += 1
        each, port = self.local_ranks(ranks), free_port(self._host)
        where = {"world_size": ranks, "ranks": each, "threads": threads, "address": self._host, "port": port}
        started = {"do": "start", "start": self._number, "attempt": folder.attempt, "command": list(command[1:]),
                   "cwd": os.getcwd(), "folder": os.path.abspath(folder.path), **where}  # fmt: skip
        self._started = []
        for number, node in enumerate(self._used, start=1):
            first = number * each
            node.send({**started, "first": first})
            self._started += [
                RemoteRank(rank=first + index, log=folder.rank_log(first + index), node=node.name, agent=node,
                           number=self._number, index=index)
                for index in range(each)
            ]  # fmt: skip
        try:
            here = start_here(
                command, ranks=each, threads=threads, attempt=folder.attempt, port=port, log_of=folder.rank_log,
                memory=memory, world_size=ranks, address=self._host,
            )  # fmt: skip
        except BaseException:
            for rank in self._started:
                rank.kill()
            raise
        if self._replication is not None:
            self._replication.begin(self._used)
        return [*here, *self._started]

    def lost(self) -> Node | None:
        """Return a node of the attempt that was lost before its ranks had ended."""
        return next((rank.agent for rank in self._started if rank.agent.why is not None and not rank.has_ended), None)

    def replace(self, rank: int) -> bool:
        """Choose the node of a rank that keeps failing last from now on; returns whether a spare takes its place."""
        node = next((each.agent for each in self._started if each.rank == rank), None)
        if node is None:  # of this node, which is in each attempt
            return False
        node.is_suspect = True
        has_spare = sum(not each.is_suspect for each in self._usable()) >= len(self._used)
        if has_spare:
            log.get("fleet").warning("a spare takes the place of node %s, whose rank %d keeps failing", node.name, rank)
        return has_spare

    def leaving(self) -> str | None:
        """Return the name of a node of the attempt that is to be stopped."""
        return next((node.name for node in self._used if node.is_leaving), None)

    def any_silent(self) -> bool:
        """Return whether a node of the attempt has been silent for some seconds."""
        return any(node.silent_s > _SILENT_S for node in self._used)

    def slots(self) -> list[Progress]:
        """Return the progress slots of the ranks of the other nodes."""
        statuses = (node.status(self._number) for node in self._used)
        return [slot for status in statuses for slot in slots_in(base64.b64decode(status.get("slots", "")))]

    def end(self, code: int) -> None:
        """Release the nodes: the run has ended."""
        self._ended.set()
        for node in self._usable():
            node.send({"do": "end", "code": code})
            node.lose("the run has ended")

    def _count(self, ranks: int) -> int:
        """Return the nodes for so many ranks."""
        return -(-ranks // self._each)

    def _usable(self) -> list[Node]:
        with self._change:
            return [node for node in self._joined if node.why is None and not node.is_leaving]

    # ---- connections ----

    def _answer(self, connection: Connection, host: str) -> None:
        request = stream.receive_message(connection)
        node = Node(str(request["join"]), connection)
        try:
            refused = self._admit(node, str(request["smalti"]), int(request["free_bytes"]))
            if refused is not None:
                log.get("fleet").warning("%s was refused: %s", host, refused)
                stream.send_message(connection, {"refused": refused})
                return
            node.listen(self._lease_s)
        finally:
            with self._change:
                if node in self._joined:
                    self._joined.remove(node)
            if node.why is not None and not self._ended.is_set():
                log.get("fleet").warning("node %s %s", node.name, "left" if node.is_leaving else f"is lost: {node.why}")

    def _admit(self, node: Node, version: str, free_bytes: int) -> str | None:
        """Welcome and add a node; returns why not. free_bytes: of its shared memory."""
        if version != __version__:
            return f"it has Smalti {version}, and {self.name} has {__version__}"
        if free_bytes < self._memory_bytes:
            needed, free = format_bytes(self._memory_bytes), format_bytes(free_bytes)
            return f"train.checkpoint.peer_copies needs {needed} of shared memory, and {node.name} has {free} free"
        with self._change:
            if self._ended.is_set():
                return "the run has ended"
            if node.name in (self.name, *(other.name for other in self._joined)):
                return f"a node {node.name} is there already; --name gives another name"
            node.send({"run": self._run, "lease_s": self._lease_s, "memory_bytes": self._memory_bytes})
            self._joined.append(node)  # other threads send to it from now on
            spares = len(self._joined) + 1 - self._count(self._ranks)
        log.get("fleet").info("node %s has joined%s", node.name, f"; {spares} spare" if spares > 0 else "")
        return None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._change:
                nodes = list(self._joined)
            for node in nodes:
                node.send({"do": "beat"})

    def _replicate(self, replication: Replication) -> None:
        while not self._ended.wait(_POLL_S):
            replication.look()


@contextmanager
def opened(config: NodesConfig | None, *, ranks: int, run: str, memory_bytes: int = 0) -> Iterator[Nodes | None]:
    """Context manager: the nodes of a run, to which others can join; None where the run has only this one.

    memory_bytes: what copies in memory take on each node; 0: there are none.
    An error ends the nodes with its exit code, any other end with 75 where ``Nodes.end`` was not called.
    Raises UserError without ``SMALTI_PEER_KEY``, and for an address that is taken or not of this node.
    """
    if config is None:
        yield None
        return
    key = peer_key()
    if key is None:
        raise UserError(
            "train.nodes needs a key that all nodes have: who has it may start commands on them",
            hint="export SMALTI_PEER_KEY=$(openssl rand -hex 32), the same on each node",
        )
    host, _, port = config.listen.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"train.nodes.listen={config.listen} cannot be opened: {error}",
            allowed="an address of this node, with a port that is free",
            hint="train.nodes.listen=HOST:PORT",
        ) from error
    nodes = Nodes(config, ranks, run, key.encode(), listener, memory_bytes)
    code = ExitCode.RETRY
    try:
        yield nodes
    except SmaltiError as error:
        code = error.exit_code
        raise
    finally:
        nodes.end(code)
        stream.end_listening(listener)
