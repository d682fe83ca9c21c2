"""Renders a chat template in a separate process, with limits on its time and memory.

A template comes with downloaded weights. jinja2's sandbox denies it files and objects, but it can loop or build a text
of gigabytes, and a thread cannot be ended (``docs/decisions/0016-templates-in-a-process.md``). Guarantees: a
text that takes more than ``LIMIT_S`` of processor time or ``MEMORY_BYTES`` fails, and the next one gets a new process;
Ctrl-C ends it. Threads wait for one another.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smalti.base.errors import missing_extra

LIMIT_S = 2.0
MEMORY_BYTES = 512 << 20
_CHILD = str(Path(__file__).with_name("chat_template_child.py"))


class TemplateFailed(Exception):
    """The template cannot be parsed, rejects the messages, or exceeds its limits."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the prefixes of them to render."""

    messages: Sequence[Mapping[str, Any]]
    prefixes: Sequence[tuple[int, bool]]
    """(number of messages, ``add_generation_prompt``) of each text."""
    tools: Sequence[Mapping[str, Any]] | None = None


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

    def render(self, conversations: Sequence[Conversation]) -> "list[list[str] | TemplateFailed]":
        """Return the texts of the prefixes of each conversation, or why it cannot be rendered."""
        with self._lock:
            try:
                return [_texts(reply) for reply in self._request([vars(c) for c in conversations])]
            except TemplateFailed as error:
                if len(conversations) == 1:
                    return [error]
        # One of them ended the process: the others are rendered without it.
        return [self.render([conversation])[0] for conversation in conversations]

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
            error = self._send(self._setup).get("error")
            if error is not None:
                raise TemplateFailed(error)
        except TemplateFailed:
            self._end()
            raise

    def _request(self, request: list[dict[str, Any]]) -> Any:
        if self._end is None or not self._end.alive:
            self._start()
        return self._send(request)

    def _send(self, request: Any) -> Any:
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
        return json.loads(line)


def _texts(reply: dict[str, Any]) -> list[str] | TemplateFailed:
    if "error" in reply:
        return TemplateFailed(reply["error"])
    whole = reply["texts"][0]
    return [whole[:text] if isinstance(text, int) else text for text in reply["texts"]]


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
