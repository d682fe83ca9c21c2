"""Renders a chat template in a separate process, with limits on its time and memory.

A template comes with downloaded weights. jinja2's sandbox denies it files and objects, but it can loop or build a text
of gigabytes, and a thread cannot be ended (``docs/decisions/0016-templates-in-a-process.md``). Guarantees: a prompt
that takes more than ``LIMIT_S`` of processor time or ``MEMORY_BYTES`` raises ``TemplateFailed``, and the next one gets
a new process; Ctrl-C ends it. Threads wait for one another.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smalti.base.errors import missing_extra

LIMIT_S = 2.0
MEMORY_BYTES = 512 << 20
_CHILD = str(Path(__file__).with_name("chat_template_child.py"))


class TemplateFailed(Exception):
    """The template cannot be parsed, rejects the messages, or exceeds its limits."""


class TemplateProcess:
    """One compiled template, which any thread can render."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        """Raises TemplateFailed if ``template`` cannot be compiled."""
        if find_spec("jinja2") is None:
            raise missing_extra("jinja2", "serve", "a chat template")
        self._setup = {"template": template, "variables": dict(variables)}
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., Any] | None = None
        with self._lock:
            self._start()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the rendered text. Raises TemplateFailed."""
        with self._lock:
            if self._end is None or not self._end.alive:
                self._start()
            return self._request({"messages": [dict(message) for message in messages]})

    def _start(self) -> None:
        # -P: do not search the folder of the script, which has files with the names of other modules.
        self._process = subprocess.Popen(
            [sys.executable, "-P", _CHILD, str(LIMIT_S), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self._request(self._setup)
        except TemplateFailed:
            self._end()
            raise

    def _request(self, request: dict[str, Any]) -> str:
        assert self._process.stdin
        assert self._process.stdout
        assert self._end
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BaseException:
            self._end()
            raise
        if not line.endswith(b"\n"):
            code = self._process.wait()
            self._end()
            raise TemplateFailed(_why(code))
        reply = json.loads(line)
        if "error" in reply:
            raise TemplateFailed(reply["error"])
        return str(reply["text"])


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it took more than {LIMIT_S:g} s of processor time"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(BrokenPipeError):
                pipe.close()
