"""The cost of the block checksums of token files, as a share of reading, and by block size.

    make bench NAME=checksum                     page cache, batches, cold reads; 512 MB in a temporary folder
    make bench NAME=checksum ARGS='--blocks'     also block sizes, and other checksums

Paired: the same rows are read with the check and with one that does nothing, alternately in one process, on one core.
The share is 1 - (time without / time with). "Cold" drops the file from the page cache before every turn; its effect
depends on the disk, so the time per row is printed too.
"""

import argparse
import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from paired import Ratio, paired
from record import RecordOption, record

from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.stream.stream import Stream
from smalti.data.tokens import TokenSource, TokenWriter
from smalti.data.tokens import format as layout

N_TOKENS = 1 << 28
ROWS = 256
SEQ_LENS = (1024, 4096, 32_768)
BLOCK_KIB = (4, 8, 16, 32, 64)


def written(folder: Path) -> TokenSource:
    """Write 512 MB of u16 tokens in documents of about a thousand."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 50_000, 1 << 22)
    cuts = np.cumsum(rng.integers(100, 2000, ids.size // 1050))
    documents = np.split(ids, cuts[cuts < ids.size])
    with TokenWriter(folder, vocab_size=50_304, eod_id=0, tokenizer_digest="ab" * 32, salt="0" * 16) as writer:
        for _ in range(N_TOKENS // ids.size):
            for document in documents:
                writer.add(document)
    return TokenSource(folder)


@contextmanager
def unchecked() -> Iterator[None]:
    """Context manager: replace the check of blocks by one that does nothing."""
    check = layout.wrong_blocks
    layout.wrong_blocks = lambda blocks, seeds: []  # type: ignore[assignment]
    try:
        yield
    finally:
        layout.wrong_blocks = check


def without(work: Callable[[], None]) -> Callable[[], None]:
    """Return the same work without the check."""

    def run() -> None:
        with unchecked():
            work()

    return run


def rows_of(source: TokenSource, seq_len: int, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Return a function that reads ROWS rows; both sides of a pair read the same rows, as they are called in turn."""
    out = np.empty((ROWS, seq_len + 1), dtype=source.dtype)
    begins = np.random.default_rng(1).integers(0, source.n_tokens - seq_len, (64, ROWS))
    turn = iter(range(1 << 40))

    def run() -> None:
        before()
        source.read_rows(begins[next(turn) // 2 % len(begins)], out)

    return run


def batches_of(folder: Path) -> Callable[[], None]:
    """Return a function that builds a batch of 64 rows of 4,096 tokens as a trainer does: order, rows, int64 inputs and
    targets, positions."""
    config = DataConfig.model_validate(
        {"sources": {"a": str(folder)}, "seq_len": 4096, "stages": [{"weights": {"a": 1}}]}
    )
    length = RunLength(1000, ((0, 64 * 4096),))
    stream = Stream(config, seed=1, length=length, microbatch_tokens=64 * 4096)
    turn = iter(range(1 << 40))

    def run() -> None:
        for batch in stream.batch(next(turn) // 2 % 900):
            assert batch.inputs.size
            assert batch.targets.size
            assert batch.positions.size

    return run


def stated(name: str, result: Ratio, n_rows: int) -> dict[str, Any]:
    """Print and return the figures of one pair; ``slow`` is with the check."""
    share = 1 - 1 / result.ratio
    checked_us = result.slow_s / n_rows * 1e6
    unchecked_us = result.fast_s / n_rows * 1e6
    print(f"{name:34s} {checked_us:8.2f} us per row, unchecked {unchecked_us:8.2f}: the check takes {share:6.1%}")
    return {**result.figures(), "checked_us_per_row": checked_us, "check_share_frac": share}


def block_sizes(path: Path) -> dict[str, Any]:
    """Measure reading and hashing alone, in microseconds per row, for each block size."""
    figures: dict[str, Any] = {}
    descriptor = os.open(path, os.O_RDONLY)
    size = path.stat().st_size
    for kib in BLOCK_KIB:
        for seq_len in SEQ_LENS:
            read_s, hash_s, n_blocks = read_and_hash(descriptor, size, kib << 10, seq_len)
            figures[f"{kib} KiB, {seq_len}"] = {"read_us": read_s * 1e6, "hash_us": hash_s * 1e6, "blocks": n_blocks}
            print(
                f"blocks of {kib:2d} KiB, rows of {seq_len:6,}: {n_blocks:5.2f} blocks, read {read_s * 1e6:5.2f} us, "
                f"hash {hash_s * 1e6:5.2f} us"
            )
    os.close(descriptor)
    return figures


def read_and_hash(descriptor: int, size: int, block: int, seq_len: int, n: int = 2000) -> tuple[float, float, float]:
    """Return the seconds per row of pread and of hashing, best of five, and the blocks per row."""
    payload = block - 16
    need = 2 * (seq_len + 1)
    at = np.random.default_rng(2).integers(0, size - need - 2 * block, n)
    counts = (at % payload + need - 1) // payload + 1
    starts = (at // block * block).tolist()
    runs = counts.tolist()
    view = memoryview(bytearray((int(counts.max()) + 1) * block))

    def timed(hashing: bool) -> float:
        begin = time.perf_counter()
        for start, blocks in zip(starts, runs, strict=True):
            os.preadv(descriptor, [view[: blocks * block]], start)
            if hashing:
                for first in range(0, blocks * block, block):
                    xxhash.xxh3_64_digest(view[first : first + block - 8], 7)
        return (time.perf_counter() - begin) / n

    read_s, both_s = (min(timed(hashing) for _ in range(5)) for hashing in (False, True))
    return read_s, both_s - read_s, float(counts.mean())


def rivals() -> dict[str, Any]:
    """Compare XXH3-64 with other checksums and a plain copy, over 16 MiB in blocks, for decision 0002."""
    data = memoryview(os.urandom(layout.BLOCK_BYTES * 2048))
    blocks = [data[at : at + layout.BLOCK_BYTES] for at in range(0, len(data), layout.BLOCK_BYTES)]

    def over(checksum: Callable[[memoryview], object]) -> Callable[[], None]:
        def run() -> None:
            for block in blocks:
                checksum(block)

        return run

    figures = {}
    for name, checksum in (("crc32", zlib.crc32), ("sha256", hashlib.sha256), ("copy", bytes)):
        result = paired(over(checksum), over(xxhash.xxh3_64_digest), names=(name, "xxh3_64"), pairs=101)
        print(f"{result}; {len(data) / result.slow_s / 1e9:.1f} and {len(data) / result.fast_s / 1e9:.1f} GB/s")
        figures[name] = result.figures()
    return figures


def main() -> None:
    """Print the shares; ``--record`` also writes bench/results/checksum.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=61)
    parser.add_argument("--blocks", action="store_true", help="also block sizes, and other checksums")
    parser.add_argument("--folder", type=Path, help="folder of the tokens, which is kept")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/checksum.json")
    options = parser.parse_args()
    names = ("checked", "unchecked")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        source = TokenSource(folder) if (folder / "manifest.json").exists() else written(folder)
        path = folder / "tokens-00000.tok"
        path.read_bytes()
        figures: dict[str, Any] = {}
        if options.blocks:
            figures["block_sizes"] = block_sizes(path)
            figures["rivals"] = rivals()
        for seq_len in SEQ_LENS:
            work = rows_of(source, seq_len)
            name = f"page cache, rows of {seq_len:,}"
            figures[name] = stated(name, paired(work, without(work), names=names, pairs=options.pairs), ROWS)
        work = batches_of(folder)
        name = "page cache, batches of 64 x 4,096"
        figures[name] = stated(name, paired(work, without(work), names=names, pairs=options.pairs), 64)
        descriptor = os.open(path, os.O_RDONLY)
        work = rows_of(source, 4096, lambda: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))
        name = "cold, rows of 4,096"
        figures[name] = stated(name, paired(work, without(work), names=names, pairs=min(options.pairs, 15)), ROWS)
        os.close(descriptor)
    if options.record:
        print("wrote", record("checksum", figures))


if __name__ == "__main__":
    main()
