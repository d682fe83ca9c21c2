"""Starts a ``smalti serve`` process on a free port, and ends it with the test."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    errors: list[str]
    """Its lines on stderr."""

    def metric(self, name: str, **headers: str) -> float:
        """One number of ``/metrics``."""
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return float(found[1])


@contextmanager
def start_server(model: Path | str, *options: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """``smalti serve MODEL --port 0 OPTIONS``, ready to answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "smalti", "serve", str(model), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert process.stdout
    assert process.stderr
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        first = process.stdout.readline()
        found = re.search(r"http://\S+", first)
        if not found:
            process.wait(30)
            reader.join(10)
            raise AssertionError(f"the server did not start: {first}{''.join(errors)}")
        yield ServerProcess(process, found[0], errors)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        process.stdout.close()
        process.stderr.close()
