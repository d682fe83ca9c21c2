"""The child process that compiles and renders one chat template; ``chat_template`` starts this file.

It replies to each JSON line of stdin with one: first ``{"template", "variables"}``, then ``{"messages"}``; a reply has
``text`` or ``error``. If a line exceeds its processor time, the kernel ends the process (SIGPROF), even in C code. Too
much memory is an error, if the system enforces RLIMIT_AS (Linux). Only jinja2 and the standard library are imported,
so that it starts in 0.1 s.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_ERROR_CHARACTERS = 2000


def main(limit_s: float, memory_bytes: int) -> None:
    """Reply to each line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    session = _Session()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reply = json.dumps({"text": session.reply(line)}).encode()
        except MemoryError:
            reply = json.dumps({"error": f"it needs more than {memory_bytes >> 20} MiB of memory"}).encode()
        except Exception as error:  # a template is a program: it may raise anything
            reply = json.dumps({"error": str(error)[:MAX_ERROR_CHARACTERS]}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


class _Session:
    """The template, compiled by the first line."""

    def __init__(self) -> None:
        self._template: Any = None
        self._variables: dict[str, Any] = {}

    def reply(self, line: bytes) -> str:
        """Return the text for one line."""
        request = json.loads(line)
        if self._template is None:
            self._variables = request["variables"]
            self._template = _environment().from_string(request["template"])
            return ""
        return str(self._template.render(messages=request["messages"], tools=None, documents=None,
                                         add_generation_prompt=True, **self._variables))  # fmt: skip


def _environment() -> Any:
    """Return a jinja2 environment as ``transformers.utils.chat_template_utils`` configures it."""

    class Generation(Extension):
        """``{% generation %}`` marks the text of the assistant, for training; here its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants a class attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    class GuardedNamespace(Namespace):
        """A namespace without attributes that begin with an underscore, which would reach those of Python."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a chat template may not set '{name}'")
            super().__setitem__(name, value)

    def namespace(**values: Any) -> Namespace:
        result = GuardedNamespace()
        for name, value in values.items():
            result[name] = value
        return result

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = namespace
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes <, > and &.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent is gone
        main(float(sys.argv[1]), int(sys.argv[2]))
