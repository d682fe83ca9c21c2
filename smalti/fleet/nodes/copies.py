"""The copies in memory of one node of several (``train.checkpoint.peer_copies``), and their exchange between nodes.

The ranks of a node write their shards to its folder ``ranks``. In ``held`` are the copies that survive the loss of a
node: this node's own shards (hard links) and those of the node before it. The lead decides which (``replication.py``).
"""

import os
import queue
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from smalti.base.errors import DataError, SmaltiError
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import LOST, Message
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import complete, is_name, step_of

_SILENCE_S = 20.0
_FILE = re.compile(r"(shards/)?[\w-][\w.-]*")


class Copies:
    """The copies of this node; its files are served to other agents with the key. Jobs are done one after the other."""

    def __init__(self, root: Path, key: bytes, host: str) -> None:
        """host: the address at which other nodes reach this one."""
        self.ranks, self._held, self._key = root / "ranks", root / "held", key
        for folder in (self.ranks, self._held):
            folder.mkdir()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._jobs: queue.Queue[Message | None] = queue.Queue()
        self._done: tuple[int, str | None] = (0, None)
        self._listing: Message = {"complete": [], "files": {}, "all": {}}
        serving = (self._listener, key, self._answer, _SILENCE_S)
        threading.Thread(target=stream.serve, args=serving, name="copies", daemon=True).start()
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def close(self) -> None:
        """End the threads; the files belong to who made the folder."""
        stream.end_listening(self._listener)
        self._jobs.put(None)

    @property
    def last_job(self) -> int:
        """Number of the last job that is done."""
        return self._done[0]

    def report(self) -> Message:
        """Return what this node has: ``complete``, copies of its own ranks; of each copy its ``files`` and the names of
        ``all`` files that it has on all nodes; and the last job that is done."""
        job, failure = self._done
        with suppress(OSError, SmaltiError):  # a copy was just deleted
            self._listing = self._look()
        return {"address": self.address, **self._listing, "job": job, "failure": failure}

    def _look(self) -> Message:
        copies = complete(self.ranks)
        held = [path.name for path in self._held.iterdir() if is_name(path.name)]
        files = {name: sorted({*_files(self.ranks / name), *_files(self._held / name)}) for name in copies + held}
        wholes = {name: _names((self.ranks if name in copies else self._held) / name) for name in files}
        return {"complete": copies, "files": files, "all": wholes}

    def do(self, job: Message) -> None:
        """Begin a job: ``job``, its number, is in the report when it is done. ``call``: ``look`` (nothing), ``hold``,
        ``gather`` or ``keep``; ``copy``: its name; ``files``: name -> address of a node that has it."""
        self._jobs.put(job)

    def _work(self) -> None:
        calls: dict[str, Callable[[Message], None]] = {
            "look": lambda _: None, "hold": self._hold, "gather": self._gather, "keep": self._keep
        }  # fmt: skip
        while (job := self._jobs.get()) is not None:
            failure = None
            try:
                calls[job["call"]](job)
            except (SmaltiError, *LOST) as error:
                failure = error.message if isinstance(error, SmaltiError) else f"{type(error).__name__}: {error}"
            self._done = (job["job"], failure)

    def _hold(self, job: Message) -> None:
        """Link the copy of the own ranks, and fetch the shards of the node before."""
        held = self._held / job["copy"]
        _link(self.ranks / job["copy"], held)
        entries, reason = manifest.listed(held)
        if reason is not None:
            raise DataError(f"{held.name} was replaced by a newer copy")
        self._fetch(job["copy"], job["files"], held, [entry for entry in entries if entry["name"] in job["files"]])

    def _gather(self, job: Message) -> None:
        """Complete a copy in the folder of the ranks, which do not run, and hold it too.

        The others are removed, and what is held of newer ones: their steps will be trained again.
        """
        for name in complete(self.ranks):
            if name != job["copy"]:
                shutil.rmtree(self.ranks / name)
        self._remove_held(lambda step: job["copy"] is None or step > step_of(job["copy"]))
        if job["copy"] is None:
            return
        whole, held = self.ranks / job["copy"], self._held / job["copy"]
        (whole / "shards").mkdir(parents=True, exist_ok=True)
        if held.is_dir():
            _link(held, whole)
        self._fetch(whole.name, job["files"], whole, ())
        reason = manifest.fault(whole)
        if reason is not None:
            shutil.rmtree(whole)
            raise DataError(f"{whole.name} is not complete: {reason}")
        _link(whole, held)

    def _keep(self, job: Message) -> None:
        """Delete the copies that are held and older."""
        self._remove_held(lambda step: step < step_of(job["copy"]))

    def _remove_held(self, is_old: Callable[[int], bool]) -> None:
        for path in list(self._held.iterdir()):
            if is_name(path.name) and is_old(step_of(path)):
                shutil.rmtree(path)

    def _fetch(self, copy: str, files: Mapping[str, str], to: Path, entries: Sequence[manifest.Entry]) -> None:
        """Fetch files of a copy from other nodes. entries: of those whose digests are compared first."""
        for place in set(files.values()):
            wanted = [name for name in files if files[name] == place]
            with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
                self._fetch_from(place, copy, wanted, Path(temporary), entries)
                for name in wanted:
                    (to / name).parent.mkdir(exist_ok=True)
                    os.replace(Path(temporary) / name, to / name)

    def _fetch_from(
        self, place: str, copy: str, wanted: Sequence[str], to: Path, entries: Sequence[manifest.Entry]
    ) -> None:
        host, _, port = place.rpartition(":")
        with stream.connect(host, int(port), self._key, silence_s=_SILENCE_S) as connection:
            stream.send_message(connection, {"copy": copy, "files": wanted})
            offer = stream.receive_message(connection)
            stream.receive_files(connection, to, [(str(name), int(size)) for name, size in offer["files"]])
        reason = manifest.first_mismatch(to, [entry for entry in entries if entry["name"] in wanted])
        if reason is not None:
            raise DataError(f"{place} sent a damaged copy: {reason}")

    def _answer(self, connection: Connection, host: str) -> None:
        request = stream.receive_message(connection)
        try:
            with self._opened(str(request["copy"]), [str(name) for name in request["files"]]) as files:
                stream.send_message(connection, {"files": stream.sizes(files)})
                stream.send_files(connection, files)
        except (DataError, FileNotFoundError) as error:
            stream.send_message(connection, {"refused": str(error)})

    @contextmanager
    def _opened(self, copy: str, names: Sequence[str]) -> Iterator[dict[str, IO[bytes]]]:
        """Open files of a copy, so that it may be deleted while they are sent."""
        if not is_name(copy) or not all(map(_FILE.fullmatch, names)):
            raise DataError(f"{copy}: {names} are no files of a copy")
        with ExitStack() as files:
            opened: dict[str, IO[bytes]] = {}
            for name in names:
                for folder in (self._held, self.ranks):
                    with suppress(FileNotFoundError):
                        opened.setdefault(name, files.enter_context(open(folder / copy / name, "rb")))
            if len(opened) < len(set(names)):
                raise DataError(f"{copy} is not here")
            yield opened


def _files(root: Path) -> list[str]:
    """Return the files of a copy; none of one that is not there, or is just being deleted."""
    try:
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    except FileNotFoundError:
        return []


def _names(root: Path) -> list[str]:
    """Return the names of all files of a copy; none where its manifest is not here."""
    entries, reason = manifest.listed(root)
    return [] if reason else sorted([*(entry["name"] for entry in entries), "manifest.json", "COMPLETE"])


def _link(source: Path, target: Path) -> None:
    """Link the files of a copy; those that are there remain."""
    (target / "shards").mkdir(parents=True, exist_ok=True)
    for name in _files(source):
        with suppress(FileExistsError):
            os.link(source / name, target / name)
