"""Writes and reads a file: ``python -m smalti.fleet.probes.disk FOLDER BYTES``.

Prints one JSON object: ``disk_bytes_per_s`` (written and flushed), or ``problem``. A process of its own, because a disk
that fails may never answer.
"""

import json
import os
import sys
import tempfile
import time

from smalti.base.disk import room


def main() -> None:
    """Measure and print JSON."""
    folder, size = sys.argv[1], int(sys.argv[2])
    try:
        os.makedirs(folder, exist_ok=True)
        print(json.dumps({"disk_bytes_per_s": _measure(folder, size)}))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        print(json.dumps({"problem": f"{folder} cannot be written: {why} ({room(folder)})"}))


def _measure(folder: str, size: int) -> float:
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".smalti-check-") as file:
        began_s = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        took_s = time.perf_counter() - began_s
        file.seek(0)
        while part := file.read(len(block)):
            if part != block:
                raise ValueError("what was written is not what is read back")
    return size / took_s


if __name__ == "__main__":
    main()
