"""Reads verified blocks of a folder of token files: locally by pread, from a store through ``data/fetch``.

A block that fails its check is read again, from another replica where there is one, and named in the error if it fails
there too. Local files are not mapped: with pread, a truncated file or a bad disk is an error with a name, not a SIGBUS
that ends the rank. Threads may share a reader. Does not cache.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smalti.base import log, store
from smalti.base.errors import DataError
from smalti.data.fetch import Files, Range
from smalti.data.fetch.descriptors import OpenFile, OpenFiles
from smalti.data.fetch.local import LocalFiles
from smalti.data.tokens import format as layout
from smalti.data.tokens.manifest import Manifest, file_name

Int64s = npt.NDArray[np.int64]

GROUP_BLOCKS = 32
"""Blocks that are read, then checked, then handed out together: 256 KiB stay in the processor's cache."""
_TRIES = 3
"""Readings after one that failed its check, each from the next copy: a transfer may be damaged, or a copy."""


class Runs(NamedTuple):
    """Runs of neighbouring blocks: run i is ``n_blocks[i]`` blocks (GROUP_BLOCKS at most) of file ``file[i]``, from
    block ``first[i]`` on."""

    file: Int64s
    first: Int64s
    n_blocks: Int64s


class Group(NamedTuple):
    """Some runs of a call, in its order."""

    runs: slice
    blocks: slice
    """The same, counted in blocks of the call."""
    data: memoryview
    """Their blocks, one after another; good until the next group is asked for."""


class BlockReader:
    """Reads blocks of one data set."""

    def __init__(self, where: str, manifest: Manifest, files: Files) -> None:
        self.where, self.manifest, self.files = where, manifest, files
        self.n_reread = 0
        """Blocks that failed their check and were good when read once more."""
        self._salt = int(manifest.salt, 16)
        self._blocks_per_file = manifest.blocks_per_file
        self._local = _LocalFiles(where, manifest) if store.is_local(where) else None
        self._buffers: list[memoryview] = []

    def read(self, runs: Runs) -> Iterator[Group]:
        """The blocks of all runs, in groups. Raises DataError for a block that is bad in every copy."""
        n_runs = len(runs.file)
        ends = np.concatenate([[0], np.cumsum(runs.n_blocks)])
        firsts = runs.file * self._blocks_per_file + runs.first
        numbers = np.arange(ends[-1]) + np.repeat(firsts - ends[:-1], runs.n_blocks)
        seeds = layout.seeds(self._salt, numbers)
        fetched = None if self._local else self.files.read(self._ranges(runs))
        step = GROUP_BLOCKS // int(runs.n_blocks.max(initial=1))
        assert step >= 1, "a run is longer than a group"
        edges = ends.tolist()
        try:
            buffer = self._buffers.pop()
        except IndexError:  # not asked before: another thread may take the last one in between
            buffer = memoryview(bytearray(GROUP_BLOCKS * layout.BLOCK_BYTES))
        try:
            for begin in range(0, n_runs, step):
                end = min(begin + step, n_runs)
                at = slice(edges[begin], edges[end])
                data = _blocks(buffer, 0, at.stop - at.start)
                if fetched is None:
                    self._load(data, runs, begin, end)
                else:
                    _join(data, fetched[begin:end])
                wrong = layout.wrong_blocks(data, seeds[at])
                if wrong:
                    for run in np.unique(np.searchsorted(ends, at.start + np.array(wrong), side="right") - 1).tolist():
                        cut = slice(edges[run], edges[run + 1])
                        mine = _blocks(data, cut.start - at.start, cut.stop - at.start)
                        self._repair(mine, int(runs.file[run]), int(runs.first[run]), seeds[cut])
                yield Group(slice(begin, end), at, data)
        finally:
            self._buffers.append(buffer)

    def check_files(self) -> None:
        """Look at every local file: there, and of the right size. Raises DataError; headers are read when opened."""
        if self._local is not None:
            for file in range(self.manifest.n_files):
                self._local.look(file)

    def close(self) -> None:
        """Close files and connections; they open again when read."""
        if self._local is not None:
            self._local.close()
        self.files.close()

    def path(self, file: int) -> str:
        """A file, for messages."""
        return store.join(self.where, file_name(file))

    def _ranges(self, runs: Runs) -> list[Range]:
        return [
            Range(file_name(file), layout.block_start(first), n * layout.BLOCK_BYTES)
            for file, first, n in zip(runs.file.tolist(), runs.first.tolist(), runs.n_blocks.tolist(), strict=True)
        ]

    def _load(self, data: memoryview, runs: Runs, begin: int, end: int) -> None:
        """The runs from the local disk. The hot loop: no more than one system call a run."""
        assert self._local is not None
        opened, preadv, at = self._local.opened.by_key, os.preadv, 0
        which = slice(begin, end)
        starts = (layout.HEADER_BYTES + runs.first[which] * layout.BLOCK_BYTES).tolist()
        sizes = (runs.n_blocks[which] * layout.BLOCK_BYTES).tolist()
        for file, start, size in zip(runs.file[which].tolist(), starts, sizes, strict=True):
            try:
                kept = opened.get(file) or self._local.open(file)
                if preadv(kept.descriptor, [data[at : at + size]], start) != size:
                    self._local.read(file, kept, start, data[at : at + size])
            except (DataError, OSError) as error:
                if isinstance(error, DataError) and not (isinstance(self.files, LocalFiles) and self.files.mirrored):
                    raise
                data[at : at + size] = self.files.read_again(Range(file_name(file), start, size))
            at += size

    def _repair(self, data: memoryview, file: int, first: int, seeds: list[int]) -> None:
        """Read a run again, until each of its blocks has been good once. Raises DataError with the first that never
        was."""
        bad = layout.wrong_blocks(data, seeds)
        n_bad = len(bad)
        for _ in range(_TRIES):
            again = self.files.read_again(Range(file_name(file), layout.block_start(first), len(data)))
            for block in set(bad) - set(layout.wrong_blocks(again, seeds)):
                _blocks(data, block, block + 1)[:] = _blocks(again, block, block + 1)
            bad = layout.wrong_blocks(data, seeds)
            if not bad:
                break
        else:
            raise layout.bad_block(self.path(file), first + bad[0])
        self.n_reread += n_bad
        self.files.counts.add("rereads", n_bad)
        # past 1, 2, 4, 8 ... in all: a bad disk must not fill the log
        if self.n_reread.bit_length() > (self.n_reread - n_bad).bit_length():
            log.get("data").warning(
                "%s: block %d failed its check and was good when read again (%d so far)",
                *(self.path(file), first, self.n_reread),
            )


def _blocks(data: memoryview, begin: int, end: int) -> memoryview:
    return data[begin * layout.BLOCK_BYTES : end * layout.BLOCK_BYTES]


def _join(data: memoryview, pieces: list[memoryview]) -> None:
    at = 0
    for piece in pieces:
        data[at : at + len(piece)] = piece
        at += len(piece)


class _LocalFiles:
    """The open files of a local folder."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.opened: OpenFiles[int] = OpenFiles()
        self._seen: set[int] = set()

    def open(self, file: int) -> OpenFile:
        """An open file; its size is checked, and its header when it is opened for the first time."""
        path = self.look(file)
        opened = OpenFile(path)
        if file not in self._seen:
            header = layout.unpack_header(os.pread(opened.descriptor, layout.HEADER_BYTES, 0), path)
            layout.agree(header, self.manifest.header_of_file(file), path)
            self._seen.add(file)
        self.opened.keep(file, opened)
        return opened

    def look(self, file: int) -> str:
        """The path of a file that is there and has the right size. Raises DataError."""
        path, expected = store.join(self.folder, file_name(file)), self.manifest.bytes_of_file(file)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist, but the manifest lists it", hint="copy the folder again"
            ) from error
        if found != expected:
            raise layout.short_file(path, found, expected)
        return path

    def read(self, file: int, opened: OpenFile, start: int, view: memoryview) -> None:
        """Fill ``view``, however many calls it takes. Raises DataError at the end of the file."""
        done = 0
        while done < len(view):
            n = os.preadv(opened.descriptor, [view[done:]], start + done)
            if n == 0:
                path = store.join(self.folder, file_name(file))
                raise layout.short_file(path, os.fstat(opened.descriptor).st_size, self.manifest.bytes_of_file(file))
            done += n

    def close(self) -> None:
        """Let go of them."""
        self.opened.close()
