"""Saves checkpoints while training continues. Each rank writes its own part; a checkpoint appears whole or not at all.

``Saver.start`` begins to copy the tensors to host memory that belongs to the saver. The caller trains on, and calls
``wait_copied`` before it changes a tensor. A thread writes the copy and agrees with the other ranks, in a process group
of its own; ``COMPLETE`` is written last. One save runs at a time, so the memory is bounded by the bytes of one. A save
may also, or only, be written to shared memory (``train.checkpoint.peer_copies``): the same files, in another folder.
"""

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smalti.base import clock, log, store
from smalti.base.disk import room
from smalti.base.env import World
from smalti.base.errors import RetryableError
from smalti.base.hashing import xxh3_stream
from smalti.distributed.checkpoint import shards
from smalti.distributed.checkpoint.staging import HostCopy
from smalti.distributed.group.world import background_group, first_failure, gather, rank
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.marks import VERIFIED, mark
from smalti.track.checkpoints.names import folder_name
from smalti.track.checkpoints.retention import Keep, prune, remove_leftovers

WRITE_TIMEOUT = timedelta(hours=2)
"""How long a rank's thread waits for the slowest writer; a dead rank ends the attempt long before."""
_BEAT_S = 1.0
_SYNC_BYTES = 1 << 30
"""After so many bytes the writer waits for the disk, so that its progress is that of the disk."""
_TEXTS = (f"shards/{shards.INDEX}", "train_state.json", "manifest.json", "COMPLETE")
"""The files of a checkpoint that are not shards, in the order to write them."""
_WRITE_BYTES = 8 << 20


@dataclass
class Save:
    """A save that was started, and its outcome."""

    step: int
    path: str
    blocked_s: float = 0.0
    """Time that the training thread has waited for it."""
    seconds: float = 0.0
    """Time from the start until it was complete or had failed."""
    staging_bytes: int = 0
    """Host memory of this rank's copy."""
    failure: str | None = None
    """Why it has failed, the same text on every rank."""
    on_disk: bool = True
    """Whether it is a checkpoint; otherwise it is only written to memory."""
    in_memory: bool = False
    """Whether it is written to memory, before it is written to the disk."""
    memory_s: float = 0.0
    """Time from the start until it was complete in memory, or had failed there."""
    memory_failure: str | None = None
    """Why it is not in memory, the same text on every rank."""


@dataclass(frozen=True)
class _Place:
    """Where a save is written."""

    folder: Path
    make_room: Callable[[], None]
    """Called by the thread of the rank that ``is_first`` before it writes."""
    is_first: bool
    """Whether this rank makes and publishes the folder: rank 0, or the first rank of each node with a folder of its
    own."""
    of_node: bool = False
    """Whether each node has a folder of its own, with the shards of its ranks and all other files."""
    verify: bool = False


class Saver:
    """Saves the checkpoints of a run below ``folder``, called by all ranks together.

    make_room: called by the thread of rank 0 before it writes. verify: the threads read each file again, from the disk
    and not from the page cache, before the checkpoint is complete; a save whose files differ from the tensors fails.
    memory: the folder of shared memory; it holds the newest copy, and the one that is being written. world: of this
    process; ranks on several nodes have a memory each, with the shards of their node alone.
    """

    def __init__(
        self,
        folder: str | Path,
        device: torch.device | None = None,
        make_room: Callable[[], None] = lambda: None,
        *,
        verify: bool = False,
        memory: Path | None = None,
        world: World | None = None,
    ) -> None:
        world = world or World(rank(), rank())
        self._disk = _Place(Path(folder), make_room, rank() == 0, verify=verify)
        self._memory = None
        if memory is not None:
            of_node = world.local_world_size < world.world_size
            make_room = partial(remove_leftovers, memory)
            self._memory = _Place(memory, make_room, world.local_rank == 0, of_node=of_node)
        self._device = device or torch.device("cpu")
        self._group = background_group(WRITE_TIMEOUT)
        self._key: Any = None
        self._copy: HostCopy | None = None
        self._shards: list[shards.Shard] = []
        self._thread: threading.Thread | None = None
        self._save: Save | None = None
        self._n_pieces = 0
        """Pieces that the thread has written or read again, so far."""
        self._waits = False
        """Whether the thread waits for those of other ranks."""

    @property
    def is_running(self) -> bool:
        """Return whether a save was begun and not collected by ``result``."""
        return self._save is not None

    @property
    def is_writing(self) -> bool:
        """Return whether this rank's part of a save is not finished."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        train_state: Mapping[str, Any],
        *,
        keep: Keep | int,
        on_disk: bool = True,
        in_memory: bool = False,
    ) -> None:
        """Begin to save ``step``, on disk or in memory or both; the save before must have been collected by ``result``.

        tensors: name -> this rank's part (DTensor) or a tensor that all ranks hold; they must not change before
        ``wait_copied`` has returned. keep: which checkpoints are not deleted when it is complete (``retention.prune``).
        """
        assert self._save is None
        began_s = clock.now_s()
        copy = self._prepare(tensors)
        copy.start(tensors)
        path = self._disk.folder / folder_name(step)
        self._save = Save(step, str(path), staging_bytes=copy.n_bytes, on_disk=on_disk, in_memory=in_memory)
        arguments = (self._save, copy, dict(train_state), keep, began_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        self._save.blocked_s += clock.now_s() - began_s

    def wait_copied(self) -> None:
        """Return when the tensors of the running save, if any, may change."""
        if self._save is not None and self._copy is not None:
            began_s = clock.now_s()
            self._copy.wait()
            self._save.blocked_s += clock.now_s() - began_s

    def result(self, beat: Callable[[], None] = lambda: None) -> Save | None:
        """Wait for the running save, and return it with its outcome; None without one.

        beat: called for each second in which this rank's thread has written, has read again, or waits for other ranks:
        not while it is stuck in its disk.
        """
        save, self._save = self._save, None
        if save is not None and self._thread is not None:
            began_s = clock.now_s()
            while self._thread.is_alive():
                before = self._n_pieces
                self._thread.join(_BEAT_S)
                if self._waits or self._n_pieces > before:
                    beat()
            save.blocked_s += clock.now_s() - began_s
        return save

    def _prepare(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Return the memory of the copy; plans what each rank writes, if the last save had other tensors."""
        key = [
            (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", ())) for name, tensor in tensors.items()
        ]
        if self._copy is None or key != self._key:
            shard, self._shards = shards.agree(tensors, self._group)
            self._copy, self._key = HostCopy(shard, self._device), key
        return self._copy

    def _run(self, save: Save, copy: HostCopy, train_state: dict[str, Any], keep: Keep | int, began_s: float) -> None:
        if save.in_memory:
            assert self._memory is not None
            save.memory_failure = self._save_in(self._memory, save.step, copy, train_state, 1)
            save.memory_s = clock.now_s() - began_s
        if save.on_disk:
            save.failure = self._save_in(self._disk, save.step, copy, train_state, keep)
        save.seconds = clock.now_s() - began_s

    def _save_in(
        self, place: _Place, step: int, copy: HostCopy, train_state: dict[str, Any], keep: Keep | int
    ) -> str | None:
        """Write the checkpoint and delete those that are not to be kept; return why it failed."""
        try:
            failure = self._write(place, place.folder / folder_name(step), copy, train_state)
            if failure is None and place.is_first:
                reason = _attempt(lambda: prune(place.folder, step, keep))
                if reason is not None:
                    log.get("checkpoint").warning(
                        "an old checkpoint in %s could not be deleted: %s", place.folder, reason
                    )
        except Exception as error:  # of the group: this rank or another is ending
            failure = f"{type(error).__name__}: {error}"
        return failure

    def _write(self, place: _Place, final: Path, copy: HostCopy, train_state: dict[str, Any]) -> str | None:
        """Write the checkpoint; return why it failed, on every rank."""
        temporary = final.with_name(f".{final.name}.tmp")
        failure = self._agree(_attempt(lambda: _begin(place, temporary)) if place.is_first else None)
        entries: list[manifest.Entry] = []
        texts: dict[str, str] = {}
        if failure is None:
            file = temporary / "shards" / shards.file_name(rank())
            write_shard = lambda: entries.append(_write_shard(place, temporary, file, copy, self._count))  # noqa: E731
            failure = self._agree(_attempt(write_shard))
        if failure is None:
            entries = gather(entries, self._group)
            publish = lambda: texts.update(self._publish(place, temporary, final, train_state, entries))  # noqa: E731
            failure = self._agree(_attempt(publish) if rank() == 0 else None)
        if failure is None and place.of_node:
            received: list[Any] = [texts]
            dist.broadcast_object_list(received, src=0, group=self._group)
            write = lambda: _write_texts(temporary, final, received[0])  # noqa: E731
            failure = self._agree(_attempt(write) if place.is_first and rank() != 0 else None)
        if failure is not None and place.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        return failure

    def _publish(
        self,
        place: _Place,
        temporary: Path,
        final: Path,
        train_state: dict[str, Any],
        entries: list[manifest.Entry],
    ) -> dict[str, str]:
        """Write the files that are not shards, and return them for the folders of other nodes."""
        index = temporary / "shards" / shards.INDEX
        store.write_text(index, shards.index_text(self._shards))
        shard_names = {entry["name"] for entry in entries}
        manifest.write(temporary, train_state, [*entries, manifest.entry(temporary, index)])
        if place.verify:
            rest = [entry for entry in manifest.listed(temporary)[0] if entry["name"] not in shard_names]
            _read_again(temporary, rest, self._count)
            mark(temporary, VERIFIED)
        _put_in_place(temporary, final)
        return {name: store.read_text(final / name) for name in _TEXTS} if place.of_node else {}

    def _count(self) -> None:
        self._n_pieces += 1

    def _agree(self, failure: str | None) -> str | None:
        self._waits = True
        try:
            return first_failure(failure, self._group)
        finally:
            self._waits = False


def save(
    folder: str | Path, step: int, tensors: dict[str, Tensor], train_state: dict[str, Any], *, keep: Keep | int
) -> str:
    """Save one checkpoint, wait for it, and return its path. Raises RetryableError on every rank where any failed."""
    saver = Saver(folder, next((tensor.device for tensor in tensors.values()), None))
    saver.start(step, tensors, train_state, keep=keep)
    done = saver.result()
    assert done is not None
    check(done)
    return done.path


def check(save: Save) -> None:
    """Raise RetryableError for a save that failed; the checkpoints that were there before are untouched then."""
    if save.failure is not None:
        folder = Path(save.path).parent
        raise RetryableError(
            f"checkpoint {save.path} could not be saved: {save.failure}; {room(folder)}",
            hint=f"free space or fix the disk under {folder}, then run the same command: it resumes from the "
            "checkpoint before",
        )


def _write_texts(temporary: Path, final: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        store.write_text(temporary / name, text)
    _put_in_place(temporary, final)


def _put_in_place(temporary: Path, final: Path) -> None:
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    store.write_text(final.parent / "latest", final.name + "\n")


def _begin(place: _Place, temporary: Path) -> None:
    place.make_room()
    _make_empty(temporary)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was moved must not be created again
    folder.mkdir()
    (folder / "shards").mkdir()


def _write_shard(place: _Place, root: Path, path: Path, copy: HostCopy, count: Callable[[], None]) -> manifest.Entry:
    """Write the file of this rank and return its entry; the digest is of the copy, not of what the disk returns.

    count: called after each piece.
    """
    digest, size, synced = xxh3_stream(), 0, 0
    data = copy.data()
    with open(path, "wb") as file:
        for part in (memoryview(copy.header), *(data[i : i + _WRITE_BYTES] for i in range(0, len(data), _WRITE_BYTES))):
            file.write(part)
            digest.update(part)
            size += len(part)
            if size - synced >= _SYNC_BYTES or size == len(copy.header) + len(data):
                file.flush()
                os.fsync(file.fileno())
                synced = size
            count()
    entry = {"name": str(path.relative_to(root)), "bytes": size, "xxh3": digest.hexdigest()}
    if place.verify:
        _read_again(root, [entry], count)
    return entry


def _read_again(root: Path, entries: list[manifest.Entry], count: Callable[[], None]) -> None:
    """Read files from the disk; raises OSError where one does not match its digest. count: called after each piece."""
    for entry in entries:
        digest = xxh3_stream()
        with open(root / entry["name"], "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # else the page cache may return what the disk does not have
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while piece := file.read(_WRITE_BYTES):
                digest.update(piece)
                count()
        if digest.hexdigest() != entry["xxh3"]:
            raise OSError(
                f"read again, {entry['name']} does not match its digest: the disk has changed what was written"
            )


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except (OSError, RuntimeError) as error:
        return str(error)
    except Exception as error:  # any error: the other ranks wait for the result
        return f"{type(error).__name__}: {error}"
    return None
