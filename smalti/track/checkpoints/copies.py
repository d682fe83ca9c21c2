"""Copies of a run's checkpoints in an object store (or another folder): uploaded, listed, fetched.

    copies = Copies("s3://bucket/run", Requests(requests_per_s=100))
    copies.upload("runs/r/checkpoints/step-00001000")      # parts that exist are not sent again
    copies.newest("runs/r/checkpoints")                    # the newest copy that verifies, complete on disk

Guarantees: ``COMPLETE`` is written last, and only if it does not exist; what is sent is what the manifest lists; a copy
is complete on disk only when each part matched its digest; a store that fails raises, and is never taken for one
without checkpoints. One process of a job uses this, so metadata is read once. The memory is ``THREADS + 1`` parts.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from smalti.base import clock, cloud, disk, log, store
from smalti.base.errors import DataError, RetryableError, SmaltiError
from smalti.base.hashing import sha256_bytes
from smalti.base.objects import Requests, open_folder, ordered
from smalti.track.checkpoints import copy_format, manifest
from smalti.track.checkpoints.copy_format import MARK, Damaged, File, Index, Mark
from smalti.track.checkpoints.marks import BLESSED, VERIFIED, is_mark, is_wanted
from smalti.track.checkpoints.names import NoneUsable, folder_name, is_name, step_of
from smalti.track.checkpoints.parts import Part, part_digest, read_parts
from smalti.track.checkpoints.retention import set_aside

Check = Callable[[str | None], None]
"""Called with the ``config.yaml`` of a copy; raises where it is of another run."""
Reject = Callable[[str, str], None]
"""Called with (checkpoint, reason) for each copy that is passed over."""

REJECTED = "REJECTED"
"""Object in a copy that was damaged and is incomplete since: its parts are sent again, whatever is there."""
THREADS = 4
_TRIES = 4
_TIDIED = 3
"""So many of the newest copies are searched for what other writers have left in them, after each upload."""
_PAUSE_S = 0.1
"""What does not match its digest is read so often, after such a pause."""


class StepTaken(DataError):
    """Another writer has completed this step with other files."""


@dataclass(frozen=True)
class Copied:
    """What an upload did."""

    url: str
    bytes: int
    """Size of the checkpoint."""
    sent_bytes: int
    """Bytes that the store did not have."""
    seconds: float


class Copies:
    """The copies in a folder ``url``: ``url/step-00001000/...``."""

    def __init__(self, url: str, requests: Requests, *, part_bytes: int = copy_format.PART_BYTES) -> None:
        self.url = url
        self.requests = requests
        self._part_bytes = part_bytes
        self._folder = open_folder(url, requests)
        self._complete: set[str] = set()
        """Names that were found complete, which never changes."""

    # ---- reading ----------------------------------------------------------------------------------------------------

    def complete(self) -> list[str]:
        """Return the names of the complete copies, newest first: one listing, and one small read for each new name."""
        return list(self._newest_first())

    def names(self) -> list[str]:
        """Return the names of the copies, newest first, also of those that are not complete; of one listing."""
        return sorted(filter(is_name, self._folder.names()), key=step_of, reverse=True)

    def newest(
        self,
        folder: str | Path,
        *,
        names: Iterable[str] | None = None,
        check: Check | None = None,
        reject: Reject | None = None,
    ) -> Path | None:
        """Fetch the newest copy that verifies into ``folder`` and return its path there; None where there is none.

        names: those of ``names`` to choose from, newest first; by default all. Damaged copies are passed over. Raises
        NoneUsable where there are copies and none can be used, and what ``check`` raises for the newest.
        """
        reasons = []
        for name in filter(self._is_complete, self.names() if names is None else names):
            try:
                return self.fetch(step_of(name), folder, check=check)
            except Damaged as error:
                reasons.append(f"{name}: {error.message}")
                if reject is not None:
                    reject(store.join(self.url, name), error.message)
        if reasons:
            raise NoneUsable(
                f"no checkpoint in {self.url} can be used: {'; '.join(reasons)}",
                hint="start anew with name=NEW_NAME, or remove this folder of the store; nothing was changed",
            )
        return None

    def fetch(self, step: int, folder: str | Path, *, check: Check | None = None) -> Path:
        """Download the copy of ``step`` into ``folder/step-...``, whole or not at all, and return that path.

        What is there is replaced, and its marks hold for the copy; a checkpoint of another run or step is renamed to
        ``rejected-step-...`` with its marks. Raises Damaged where an object is missing or has other bytes,
        DataError where there is no complete copy, RetryableError where the store fails or the disk is full.
        """
        name = folder_name(step)
        index = self.index(name)
        if check is not None:
            check(index.config)
        final = Path(folder) / name
        temporary = final.with_name(f".{name}.fetching")
        try:
            with disk.writing(folder):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                self._write_files(name, index, temporary)
                digest = sha256_bytes((temporary / "manifest.json").read_bytes())
                store.write_text(temporary / MARK, digest + "\n")
                reason = None
                with suppress(DataError, ValueError):  # none is there, or it is damaged
                    reason = manifest.misplaced(final)
                if reason is not None:
                    log.get("checkpoint").warning("%s is renamed to %s: %s", final, set_aside(final), reason)
                for mark in sorted({path.name for path in final.glob("*") if is_mark(path.name)} - {VERIFIED}):
                    shutil.copyfile(final / mark, temporary / mark)
                shutil.rmtree(final, ignore_errors=True)  # not complete, or damaged
                os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def index(self, name: str) -> Index:
        """Return the index of a complete copy; one that does not match its digest is read again first."""
        place = store.join(self.url, name)
        for last in (False,) * (_TRIES - 1) + (True,):
            data = self._mark(name)
            if data is None:
                raise DataError(
                    f"{place} is no complete checkpoint: it has no {MARK}",
                    allowed=", ".join(self.complete()) or "none is complete there",
                )
            try:
                mark = copy_format.parse_mark(place, data)
                return copy_format.parse_index(place, mark, self._read(f"{name}/{mark.index}"))
            except FileNotFoundError as error:
                if last:
                    raise Damaged(f"{place}/{mark.index} is missing") from error
            except Damaged:
                if last:
                    raise
            self.requests.stop.wait(_PAUSE_S)
        raise AssertionError("the last try raises")

    def parts(self, name: str, index: Index) -> Iterator[bytes]:
        """Yield the parts of all files of a copy in their order. Raises Damaged for the first that is."""
        digests = [digest for file in index.files for digest in file.parts]
        jobs = [(part, size, digest) for (part, size), digest in zip(index.sizes().items(), digests, strict=True)]
        return ordered(lambda job: self.part(name, *job), jobs, THREADS)

    def fault(self, name: str, read: Callable[[int], None] = lambda _: None) -> str | None:
        """Return why a complete copy is damaged or of another step or run, or None. read: called with the bytes of each
        part."""
        try:
            index = self.index(name)
            for data in self.parts(name, index):
                read(len(data))
            states = tuple(file for file in index.files if file.name == "train_state.json")
            state = json.loads(b"".join(self.parts(name, replace(index, files=states))) or "{}")
            return manifest.of_another_place(state, name, index.config, store.join(self.url, name))
        except Damaged as error:
            return error.message

    def marks(self, name: str) -> set[str]:
        """Return the marks of a copy (``marks.py``), of one listing."""
        return set(filter(is_mark, self._present(name)))

    def _newest_first(self) -> Iterator[str]:
        return filter(self._is_complete, self.names())

    def _is_complete(self, name: str) -> bool:
        if name not in self._complete and self._mark(name) is not None:
            self._complete.add(name)
        return name in self._complete

    def _mark(self, name: str) -> bytes | None:
        """Return the contents of ``COMPLETE``; None where it does not exist."""
        try:
            return self._read(f"{name}/{MARK}")
        except FileNotFoundError:
            return None

    def _read(self, path: str) -> bytes:
        """Return a small object; a page of a proxy instead of it is not taken for damage."""
        for _ in range(_TRIES):
            data = self._folder.get(path)
            if not cloud.is_page(data, path):
                return data
            self.requests.stop.wait(_PAUSE_S)
        raise cloud.page_error(store.join(self.url, path), data)

    def _write_files(self, name: str, index: Index, root: Path) -> None:
        contents = self.parts(name, index)
        for file in index.files:
            path = root / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as opened:
                for _ in file.parts:
                    opened.write(next(contents))
                opened.flush()
                os.fsync(opened.fileno())

    def part(self, name: str, part: str, size: int, digest: str) -> bytes:
        """Return a part of a copy, by its name in the index. Raises Damaged where it does not match its digest."""
        path = f"{name}/{part}"
        where = store.join(self.url, path)
        for _ in range(_TRIES):
            try:
                data = self._folder.get(path)
            except FileNotFoundError as error:
                raise Damaged(f"{where} is missing") from error
            if part_digest(data) == digest:
                return data
            self.requests.stop.wait(_PAUSE_S)
        if cloud.is_page(data, path):
            raise cloud.page_error(where, data)
        if len(data) != size:
            raise Damaged(f"{where} has {len(data)} bytes; {size} were written")
        raise Damaged(f"{where} does not match its digest")

    # ---- writing ----------------------------------------------------------------------------------------------------

    def upload(
        self,
        checkpoint: str | Path,
        *,
        config: str | None = None,
        named: str | None = None,
        check: Check | None = None,
    ) -> Copied:
        """Copy a complete local checkpoint; what an earlier attempt has sent is not sent again.

        config: ``config.yaml`` of the run. named: name of the copy, by default that of the folder. check: is called
        first, with the config of the copy of this step, or else of the newest one. Nothing is listed for a step that is
        complete. Raises StepTaken where another writer has completed this step with other files, DataError where the
        checkpoint is damaged or deleted meanwhile, RetryableError where the store fails for too long; the next upload
        then continues.
        """
        began_s = clock.now_s()
        root = Path(checkpoint)
        name = named or root.name
        entries, reason = manifest.listed(root)
        if reason is not None:
            raise DataError(f"{root} is not copied: {reason}", hint="copy another checkpoint")
        entries = [*entries, manifest.entry(root, root / "manifest.json")]
        bytes_ = sum(int(entry["bytes"]) for entry in entries)
        is_complete = self._mark(name) is not None
        newest = name if is_complete else next(self._newest_first(), None) if check is not None else None
        if check is not None and newest is not None:
            check(self.index(newest).config)
        if is_complete:
            files = tuple(_file(entry, ()) for entry in entries)
            self._require_same(name, Index(files, config, self._part_bytes))
            return Copied(store.join(self.url, name), bytes_, 0, clock.now_s() - began_s)
        index, sent_bytes = self._send_files(root, name, entries, self._sent(name), config)
        self._publish(name, index)
        return Copied(store.join(self.url, name), bytes_, sent_bytes, clock.now_s() - began_s)

    def mark(self, name: str, mark: str, *, off: bool = False) -> None:
        """Mark a copy with the present time, or remove the mark."""
        if off:
            self._folder.delete([f"{name}/{mark}"])
        else:
            self._folder.put(f"{name}/{mark}", f"{clock.utc_text()}\n".encode())

    def reject(self, name: str) -> None:
        """Make a copy incomplete, so that its step can be copied again; what was said of its contents is deleted.

        Its parts remain until an upload deletes what is not complete; protected and registered ones until the step is
        complete again.
        """
        self._folder.put(f"{name}/{REJECTED}", f"{clock.utc_text()}\n".encode())
        self._folder.delete([f"{name}/{mark}" for mark in (MARK, BLESSED, VERIFIED)])
        self._complete.discard(name)

    def remove(self, name: str) -> None:
        """Delete a copy, ``COMPLETE`` first; the next upload deletes what remains where this is interrupted."""
        self._folder.delete([f"{name}/{MARK}"])
        self._complete.discard(name)
        present = sorted(self._present(name), key=is_mark, reverse=True)  # marks first: they keep the others
        self._folder.delete(f"{name}/{path}" for path in present)

    def receive(self, source: "Copies", name: str, read: Callable[[int], None] = lambda _: None) -> Copied:
        """Copy a copy of another store, part by part, and return what was done. Raises as ``upload`` and ``fetch``.

        read: called with the bytes of each part.
        """
        began_s = clock.now_s()
        index, sent_bytes = source.index(name), 0
        bytes_ = sum(file.bytes for file in index.files)
        present = self._sent(name)
        if MARK in present:
            self._require_same(name, index)
            return Copied(store.join(self.url, name), bytes_, 0, clock.now_s() - began_s)
        for part, data in zip(index.sizes(), source.parts(name, index), strict=True):
            if present.get(part) != len(data):
                self._folder.put(f"{name}/{part}", data)
                sent_bytes += len(data)
            read(len(data))
        self._publish(name, index)
        return Copied(store.join(self.url, name), bytes_, sent_bytes, clock.now_s() - began_s)

    def _present(self, name: str) -> dict[str, int]:
        """Return the objects of a step, by their names below it."""
        return {path.removeprefix(f"{name}/"): size for path, size in self._folder.sizes(name).items()}

    def _sent(self, name: str) -> dict[str, int]:
        """Return those of ``_present`` that need not be sent again."""
        present = self._present(name)
        return {} if REJECTED in present and MARK not in present else present

    def _send_files(
        self, root: Path, name: str, entries: Sequence[manifest.Entry], present: Mapping[str, int], config: str | None
    ) -> tuple[Index, int]:
        """Send the parts that are not present; returns the index, and how many bytes were sent."""

        def send(part: Part) -> tuple[str, str, int]:
            digest = part_digest(part.data)
            path = copy_format.part_name(part.file, part.number, digest)
            if present.get(path) == len(part.data):
                return part.file, digest, 0
            self._folder.put(f"{name}/{path}", part.data)
            return part.file, digest, len(part.data)

        digests: dict[str, list[str]] = {entry["name"]: [] for entry in entries}
        sent_bytes = 0
        parts = (part for entry in entries for part in read_parts(root, entry, self._part_bytes))
        for file, digest, part_bytes in ordered(send, parts, THREADS):
            digests[file].append(digest)
            sent_bytes += part_bytes
        files = tuple(_file(entry, digests[entry["name"]]) for entry in entries)
        return Index(files, config, self._part_bytes), sent_bytes

    def _publish(self, name: str, index: Index) -> None:
        """Write the index, then ``COMPLETE`` if all parts are there and no other writer has completed the step."""
        data = index.to_bytes()
        mark = Mark(copy_format.index_name(data), sha256_bytes(data), _writer())
        self._folder.put(f"{name}/{mark.index}", data)
        present = self._present(name)
        if MARK in present:
            self._require_same(name, index)
            return
        missing = [part for part, size in index.sizes().items() if present.get(part) != size]
        if missing:
            raise RetryableError(
                f"{store.join(self.url, name)} lacks parts that were sent: {', '.join(missing[:3])}",
                hint="another process deletes them: is another run copied to this folder?",
            )
        written = self._folder.put_new(f"{name}/{MARK}", mark.to_bytes())
        if not written or self._mark(name) != mark.to_bytes():  # some stores ignore the condition
            self._require_same(name, index)
        self._complete.add(name)
        self._remove_leftovers(name)

    def _require_same(self, name: str, index: Index) -> None:
        """Raise StepTaken where the step was completed with other files; what is not of that copy is deleted."""
        place = store.join(self.url, name)
        data = self._mark(name)
        if data is None:  # the store reported a conflict with a writer that then failed
            raise RetryableError(f"{place}/{MARK} is being written by another process", hint="copy it again")
        winner = copy_format.parse_mark(place, data)
        if self.index(name).same_files(index):
            return
        with suppress(SmaltiError):
            self._folder.delete(self._leftovers(name))
        raise StepTaken(
            f"{place} was completed by {winner.writer}, with other files than those of this process",
            hint="two processes save the same run, or the run went back and trained this step again; "
            "that copy remains. To replace it, remove it from the store",
        )

    def _remove_leftovers(self, name: str) -> None:
        """Delete what broken uploads left: in this copy and the ones before it, and steps that were never completed.

        A writer that lost a step and was killed has left its parts in the copy of the winner.
        """
        try:
            names = [each for each in filter(is_name, self._folder.names()) if step_of(each) <= step_of(name)]
            complete = sorted(filter(self._is_complete, names), key=step_of)
            for each in {*names} - {*complete[:-_TIDIED]}:
                with suppress(Damaged):
                    self._folder.delete(self._leftovers(each))
        except SmaltiError as error:  # the copy is complete; the next upload tries again
            log.get("checkpoint").warning("leftovers in %s were not deleted: %s", self.url, error.message)

    def _leftovers(self, name: str) -> list[str]:
        """Return the objects of a step that its copy does not have: all of them where it is not complete.

        None of a damaged one that was set aside and is protected or registered.
        """
        present, kept = self._present(name), set()
        if MARK in present:
            mark = copy_format.parse_mark(store.join(self.url, name), self._read(f"{name}/{MARK}"))
            kept = {MARK, mark.index, *self.index(name).sizes(), *filter(is_mark, present)}
        elif is_wanted(present):
            return []
        return [f"{name}/{path}" for path in present if path not in kept]


def _file(entry: manifest.Entry, parts: Sequence[str]) -> File:
    return File(entry["name"], entry["bytes"], entry.get("xxh3") or entry["sha256"], tuple(parts))


def _writer() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} at {clock.utc_text()}"
