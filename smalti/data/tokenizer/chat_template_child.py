"""The child process that compiles and renders one chat template; ``chat_template`` starts this file.

It replies to each JSON line of stdin with one. First ``{"template", "variables"}``: a reply has ``texts`` or ``error``.
Then a list of conversations ``{"messages", "tools", "prefixes"}``: a list of such replies. If a text exceeds its
processor time, the kernel ends the process (SIGPROF), even in C code. Too much memory is an error, if the system
enforces RLIMIT_AS (Linux). Only jinja2 and the standard library are imported, so that it starts in 0.1 s.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
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
    output = sys.stdout.buffer
    compiled: list[Callable[..., str]] = []
    output.write(_limited(partial(_compile, json.loads(sys.stdin.buffer.readline()), compiled), limit_s, memory_bytes))
    output.write(b"\n")
    output.flush()
    for line in sys.stdin.buffer:
        output.write(b"[")
        for i, conversation in enumerate(json.loads(line)):
            work = partial(_texts, conversation, compiled[0], limit_s)
            output.write(b"," * (i > 0) + _limited(work, limit_s, memory_bytes))
        output.write(b"]\n")
        output.flush()


def _limited(work: Callable[[], list[Any]], limit_s: float, memory_bytes: int) -> bytes:
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return json.dumps({"texts": work()}).encode()
    except MemoryError:
        return json.dumps({"error": f"it needs more than {memory_bytes >> 20} MiB of memory"}).encode()
    except Exception as error:  # a template is a program: it may raise anything
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        return json.dumps({"error": (line + str(error))[:MAX_ERROR_CHARACTERS]}).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compile(request: dict[str, Any], compiled: list[Callable[..., str]]) -> list[Any]:
    template = _environment().from_string(request["template"])
    compiled.append(partial(template.render, documents=None, **request["variables"]))
    return []


def _texts(request: dict[str, Any], render: Callable[..., str], limit_s: float) -> list[str | int]:
    """Return the text of each prefix ``[number of messages, add_generation_prompt]``.

    A text that the first one begins with is replaced by its length: most are, and they need not be sent.
    """
    messages, tools = request["messages"], request["tools"]
    texts: list[str | int] = []
    for n, prompt in request["prefixes"]:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        text = str(render(messages=messages[:n], tools=tools, add_generation_prompt=prompt))
        texts.append(len(text) if texts and str(texts[0]).startswith(text) else text)
    return texts


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
