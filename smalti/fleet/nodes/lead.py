"""The lead's side: accepts the agents of other nodes, and starts the ranks of an attempt on them."""

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from smalti import __version__
from smalti.base import clock, log
from smalti.base.env import peer_key
from smalti.base.errors import ExitCode, SmaltiError, UserError
from smalti.base.units import format_bytes, format_seconds
from smalti.config.durations import to_seconds
from smalti.config.nodes import NodesConfig
from smalti.fleet.agent.evidence import Look
from smalti.fleet.agent.health import Check
from smalti.fleet.launch.local import Rank, free_port
from smalti.fleet.launch.local import start as start_here
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import Message
from smalti.fleet.nodes.copies import Copies
from smalti.fleet.nodes.node import Node, RemoteRank
from smalti.fleet.nodes.replication import LocalNode, Replication
from smalti.track.progress import Progress, slots_in
from smalti.track.run import RunFolder

BEAT_S = 1.0
"""How often each side sends at least."""
_SILENT_S = 3.0
_POLL_S = 0.1
_CHECK_S = 5.0
"""More for the results of the checks of other nodes."""
_LOOK_S = 5.0
"""For stacks and counts of the ranks of other nodes, which then lack where all was silent."""


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
        self._excluded: dict[str, str] = {}
        """Names of nodes that are not admitted any more -> why."""
        self._refused: dict[str, str] = {}
        """Names of nodes that were refused -> why."""
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

    def look(self, look_here: Callable[[], Look]) -> Look:
        """Return the stacks and counts of collectives of all ranks. look_here: of those of this node."""
        others = [node for node in self._used if not node.is_lost]
        asked = [node.ask({"do": "look"}) for node in others]
        here = look_here()
        stacks, counts = dict(here.stacks), dict(here.counts)
        for answer in self._answers(others, asked, _LOOK_S):
            stacks |= {int(rank): stack for rank, stack in answer.get("stacks", {}).items()}
            counts |= {int(rank): count for rank, count in answer.get("counts", {}).items()}
        return Look(stacks, counts)

    def check(
        self,
        command: str,
        limit_s: float,
        logs: Path,
        run_here: Callable[[Mapping[str, str]], Check],
        stops: Callable[[], bool] = lambda: False,
    ) -> list[Check]:
        """Run a command that checks a node on all nodes of the attempt, as one rank on each; this node is the first.

        logs: folder of the output. run_here: runs it on this node, with these variables. stops: whether to wait no
        longer for the others.
        """
        others = [node for node in self._used if not node.is_lost]
        where = {"WORLD_SIZE": str(1 + len(others)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": self._host, "MASTER_PORT": str(free_port(self._host))}  # fmt: skip
        files = [logs / f"health-{rank}.log" for rank in range(1, 1 + len(others))]
        request, end_s = {"do": "check", "command": command, "limit_s": limit_s}, clock.now_s() + limit_s + _CHECK_S
        asked = [
            node.ask({**request, "file": str(file), "environment": {**where, "RANK": str(rank)}})
            for rank, (node, file) in enumerate(zip(others, files, strict=True), start=1)
        ]
        here = run_here({**where, "RANK": "0"})
        answers = self._answers(others, asked, end_s - clock.now_s(), stops)
        results = zip(others, answers, files, strict=True)
        return [here, *(Check(node.name, answer.get("code"), file) for node, answer, file in results)]

    def _answers(
        self, nodes: Sequence[Node], asked: Sequence[int], limit_s: float, stops: Callable[[], bool] = lambda: False
    ) -> list[Message]:
        """Wait for the answers of nodes, and return them; empty ones of those that do not answer in time."""
        pairs, end_s = list(zip(nodes, asked, strict=True)), clock.now_s() + limit_s
        while clock.now_s() < end_s and not stops():
            if all(node.is_lost or node.answer(number) is not None for node, number in pairs):
                break
            time.sleep(_POLL_S)
        return [node.answer(number) or {} for node, number in pairs]

    def exclude(self, name: str, why: str) -> None:
        """Leave a node out from now on; its agent ends, or is refused."""
        with self._change:
            self._excluded[name] = why
        for node in [node for node in self._usable() if node.name == name]:
            node.send({"do": "end", "code": int(ExitCode.RETRY)})
            node.lose(why)

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
                if self._refused.get(node.name) != refused:  # it tries again each second
                    log.get("fleet").warning("%s was refused: %s", host, refused)
                self._refused[node.name] = refused
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
            if node.name in self._excluded:
                return self._excluded[node.name]
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
