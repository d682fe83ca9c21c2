"""The child process that compiles and renders one chat template; ``chat_template`` starts it by the path of this file.

Reads a JSON object a line and answers each with one: first ``{"template", "variables"}``, then ``{"messages"}``; the
answer has ``text`` or ``error``. The kernel ends the process (SIGPROF) when a line has taken its processor time,
whatever runs then: a loop of the template, or one call in C that no Python code could interrupt. Memory beyond the
limit is an error of the template, where the system enforces RLIMIT_AS (Linux). Ends when its stdin does.

Imports jinja2 and the standard library only: it starts in 0.1 s, and nothing of this package is in its memory.
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

MOST_ERROR_CHARACTERS = 2000


def main(limit_s: float, memory_bytes: int) -> None:
    """Answer line by line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process where it wants to
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    session = _Session()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reply = json.dumps({"text": session.answer(line)}).encode()
        except MemoryError:
            reply = json.dumps({"error": f"it needs more than {memory_bytes >> 20} MiB of memory"}).encode()
        except Exception as error:  # a template is a program: it may raise anything
            reply = json.dumps({"error": str(error)[:MOST_ERROR_CHARACTERS]}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


class _Session:
    """The template between two lines."""

    def __init__(self) -> None:
        self._template: Any = None
        self._variables: dict[str, Any] = {}

    def answer(self, line: bytes) -> str:
        """The text for one line."""
        asked = json.loads(line)
        if self._template is None:
            self._variables = asked["variables"]
            self._template = _environment().from_string(asked["template"])
            return ""
        return str(self._template.render(messages=asked["messages"], tools=None, documents=None,
                                         add_generation_prompt=True, **self._variables))  # fmt: skip


def _environment() -> Any:
    """jinja2 as ``transformers.utils.chat_template_utils`` sets it up."""

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says, for training; here it is passed through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants a class attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    class GuardedNamespace(Namespace):
        """Attributes of a namespace whose name begins with an underscore would reach Python's own."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a chat template may not set '{name}'")
            super().__setitem__(name, value)

    def namespace(**values: Any) -> Namespace:
        made = GuardedNamespace()
        for name, value in values.items():
            made[name] = value
        return made

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
    # jinja2's own filter escapes <, > and &, which a model would then have to read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent is gone
        main(float(sys.argv[1]), int(sys.argv[2]))
