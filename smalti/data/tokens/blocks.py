"""Reads verified blocks of a folder of token files: locally by pread, from a store through ``data/fetch``.

A block that fails its check is read again, from another replica if there is one; the error names a block that fails in
all of them. Local files are not memory-mapped: with pread, a truncated file or a bad disk is an error that names the
file, not a SIGBUS that ends the rank. Thread-safe. Does not cache.
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
"""Blocks that are read and checked at a time: 256 KiB fit into the processor's cache."""
_RETRIES = 3
"""Reads after a failed check, each from the next replica: the transfer or a replica may be damaged."""


class Runs(NamedTuple):
    """Runs of neighbouring blocks: run i is ``n_blocks[i]`` blocks (at most GROUP_BLOCKS) of file ``file[i]``,
    starting at block ``first[i]``."""

    file: Int64s
    first: Int64s
    n_blocks: Int64s


class Group(NamedTuple):
    """Consecutive runs of a call of ``BlockReader.read``."""

    runs: slice
    blocks: slice
    """The same runs, as indexes of the blocks of the call."""
    data: memoryview
    """The blocks, concatenated; valid until the next group is requested."""


class BlockReader:
    """Reads blocks of one data set."""

    def __init__(self, where: str, manifest: Manifest, files: Files) -> None:
        self.where = where
        self.manifest = manifest
        self.files = files
        self.n_reread = 0
        """Number of blocks that failed their check and passed it when read again."""
        self._salt = int(manifest.salt, 16)
        self._blocks_per_file = manifest.blocks_per_file
        self._local = _LocalFiles(where, manifest) if store.is_local(where) else None
        self._buffers: list[memoryview] = []

    def read(self, runs: Runs) -> Iterator[Group]:
        """Yield the blocks of all runs, in groups. Raises DataError for a block that is damaged in every replica."""
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
        except IndexError:  # caught and not tested before: another thread may take the last buffer in between
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
        """Check that every local file exists and has the right size. Raises DataError. Headers are checked on open."""
        if self._local is not None:
            for file in range(self.manifest.n_files):
                self._local.checked_path(file)

    def close(self) -> None:
        """Close files and connections, which are opened again by the next read."""
        if self._local is not None:
            self._local.close()
        self.files.close()

    def path(self, file: int) -> str:
        """Path of a file, for messages."""
        return store.join(self.where, file_name(file))

    def _ranges(self, runs: Runs) -> list[Range]:
        return [
            Range(file_name(file), layout.block_start(first), n * layout.BLOCK_BYTES)
            for file, first, n in zip(runs.file.tolist(), runs.first.tolist(), runs.n_blocks.tolist(), strict=True)
        ]

    def _load(self, data: memoryview, runs: Runs, begin: int, end: int) -> None:
        """Read runs from the local disk. This is the hot loop: at most one system call per run."""
        assert self._local is not None
        open_files = self._local.opened.by_key
        preadv = os.preadv
        at = 0
        which = slice(begin, end)
        starts = (layout.HEADER_BYTES + runs.first[which] * layout.BLOCK_BYTES).tolist()
        sizes = (runs.n_blocks[which] * layout.BLOCK_BYTES).tolist()
        for file, start, size in zip(runs.file[which].tolist(), starts, sizes, strict=True):
            try:
                open_file = open_files.get(file) or self._local.open(file)
                if preadv(open_file.descriptor, [data[at : at + size]], start) != size:
                    self._local.read(file, open_file, start, data[at : at + size])
            except (DataError, OSError) as error:
                if isinstance(error, DataError) and not (isinstance(self.files, LocalFiles) and self.files.mirrored):
                    raise
                data[at : at + size] = self.files.read_again(Range(file_name(file), start, size))
            at += size

    def _repair(self, data: memoryview, file: int, first: int, seeds: list[int]) -> None:
        """Read a run again until each of its blocks has passed its check once.

        Raises DataError with the first block that never did.
        """
        bad = layout.wrong_blocks(data, seeds)
        n_bad = len(bad)
        for _ in range(_RETRIES):
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
        # logged when the total passes 1, 2, 4, 8 ..., so that a bad disk does not fill the log
        if self.n_reread.bit_length() > (self.n_reread - n_bad).bit_length():
            log.get("data").warning(
                "%s: block %d failed its check and passed it when read again (%d such blocks so far)",
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
        self.folder = folder
        self.manifest = manifest
        self.opened: OpenFiles[int] = OpenFiles()
        self._checked_headers: set[int] = set()

    def open(self, file: int) -> OpenFile:
        """Open a file and check its size, and the first time its header. Raises DataError."""
        path = self.checked_path(file)
        open_file = OpenFile(path)
        if file not in self._checked_headers:
            header = layout.unpack_header(os.pread(open_file.descriptor, layout.HEADER_BYTES, 0), path)
            layout.check_header(header, self.manifest.header_of_file(file), path)
            self._checked_headers.add(file)
        self.opened.keep(file, open_file)
        return open_file

    def checked_path(self, file: int) -> str:
        """Return the path of a file. Raises DataError if it does not exist or has the wrong size."""
        path = store.join(self.folder, file_name(file))
        expected_bytes = self.manifest.bytes_of_file(file)
        try:
            n_bytes = os.stat(path).st_size
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist, but the manifest lists it", hint="copy the folder again"
            ) from error
        if n_bytes != expected_bytes:
            raise layout.wrong_size(path, n_bytes, expected_bytes)
        return path

    def read(self, file: int, opened: OpenFile, start: int, view: memoryview) -> None:
        """Fill ``view``, with as many calls as needed. Raises DataError at the end of the file."""
        done = 0
        while done < len(view):
            n = os.preadv(opened.descriptor, [view[done:]], start + done)
            if n == 0:
                path = store.join(self.folder, file_name(file))
                raise layout.wrong_size(path, os.fstat(opened.descriptor).st_size, self.manifest.bytes_of_file(file))
            done += n

    def close(self) -> None:
        """Close all files."""
        self.opened.close()
