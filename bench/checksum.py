"""Checksums of 64 KiB blocks: XXH3-64 against zlib.crc32, SHA-256 and a plain copy, in gigabytes a second.

The token reader verifies every block that it touches, so the checksum must cost little beside reading the block.
"""

import argparse
import hashlib
import os
import zlib
from collections.abc import Callable

import xxhash
from paired import paired
from record import record

BLOCK_BYTES = 65_536
BLOCKS = 256


def over(blocks: list[memoryview], checksum: Callable[[memoryview], object]) -> Callable[[], None]:
    """A function that runs ``checksum`` over every block."""

    def run() -> None:
        for block in blocks:
            checksum(block)

    return run


def main() -> None:
    """Print the paired ratios; ``--record`` also writes bench/results/checksum.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=201)
    parser.add_argument("--record", action="store_true", help="write bench/results/checksum.json")
    options = parser.parse_args()
    data = memoryview(os.urandom(BLOCK_BYTES * BLOCKS))
    blocks = [data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(BLOCKS)]
    fast = over(blocks, xxhash.xxh3_64_intdigest)
    rivals = {"crc32": over(blocks, zlib.crc32), "sha256": over(blocks, hashlib.sha256), "copy": over(blocks, bytes)}
    figures = {}
    for name, slow in rivals.items():
        result = paired(slow, fast, names=(name, "xxh3_64"), pairs=options.pairs)
        speed = {name: len(data) / result.slow_s / 1e9, "xxh3_64": len(data) / result.fast_s / 1e9}
        print(result, "|", ", ".join(f"{key} {value:.2f} GB/s" for key, value in speed.items()))
        figures[name] = {**result.figures(), "gigabytes_per_s": speed}
    if options.record:
        print("wrote", record("checksum", figures))


if __name__ == "__main__":
    main()
