"""The reference pages that are written from the code: command line, config fields, metric names.

A page has only what the code says, nothing typed by hand; the text is the docstring below each field, the
help of each command, and the table of track/names.py.
"""

import importlib
import importlib.util
import json
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from types import NoneType
from typing import Any, Literal

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from smalti.cli.main import VERBS, app_of, help_page
from smalti.config import schema
from smalti.config.build import BuildConfig
from smalti.config.curate import CurateConfig, TokenizeConfig
from smalti.config.dedup import DedupConfig
from smalti.config.eval import EvalConfig
from smalti.config.examples import ExamplesConfig
from smalti.config.run import RunConfig
from smalti.track.events import EVENTS
from smalti.track.names import TABLE

_HEAD = "<!-- Written by `make docs` from the code; edit there. -->\n\n"

_ROOTS: dict[str, type[BaseModel]] = {
    "smalti train": RunConfig,
    "smalti data build": BuildConfig,
    "smalti data curate": CurateConfig,
    "smalti data dedup": DedupConfig,
    "smalti data tokenize": TokenizeConfig,
    "smalti eval run": EvalConfig,
    "smalti tune show": ExamplesConfig,
}

_KINDS = {
    "Duration": "duration",
    "Interval": "duration",
    "Length": "length",
    "Cadence": "cadence",
    "Real": "number",
    "Whole": "whole number",
}
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def pages() -> dict[str, str]:
    """File name under docs/reference -> its text."""
    return {"cli.md": cli_page(), "config.md": config_page(), "metrics.md": metrics_page()}


def cli_page() -> str:
    """Return the page with the help of every verb."""
    out = [_HEAD, "# Command line\n\n", _code(help_page())]
    for verb in VERBS:
        command = command_of(verb)
        if command is not None:
            out.append(f"\n## `smalti {verb}`\n\n")
            out.extend(_helps(command, context_of(command, f"smalti {verb}")))
    return "".join(out)


@cache
def command_of(verb: str) -> Any:
    """Return the parser of a verb (typer's own copy of click's Command), or None where its module does not exist."""
    if importlib.util.find_spec(f"smalti.cli.{verb}") is None:
        return None
    app = app_of(verb)
    app.rich_markup_mode = None
    return typer.main.get_command(app)


def subcommands(command: Any, context: Any) -> dict[str, Any]:
    """Name -> parser of the commands below a group; empty for a command."""
    names = command.list_commands(context) if hasattr(command, "list_commands") else ()
    return {name: command.get_command(context, name) for name in names}


def context_of(command: Any, name: str, parent: Any = None) -> Any:
    """Return a context for printing the command's help, 100 columns wide."""
    return command.context_class(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)


def leaves() -> Iterator[tuple[str, Any, Any]]:
    """Name (``smalti runs ls``), parser and context of every command that has none below it."""
    pending = [(f"smalti {verb}", command_of(verb)) for verb in VERBS]
    while pending:
        name, command = pending.pop()
        assert command is not None, f"{name} has no module in smalti/cli"
        context = context_of(command, name)
        inner = subcommands(command, context)
        pending += [(f"{name} {below}", parser) for below, parser in inner.items()]
        if not inner:
            yield name, command, context


def _helps(command: Any, context: Any) -> Iterator[str]:
    yield _code(command.get_help(context))
    for name, inner in subcommands(command, context).items():
        yield f"\n### `{context.command_path} {name}`\n\n"
        yield from _helps(inner, context_of(inner, name, context))


def _code(text: str) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n```\n"


def config_page() -> str:
    """Every field of every config: key, type, default, meaning, identity or placement."""
    out = [
        _HEAD,
        "# Config reference\n\n",
        "One table for each kind of config file. A field marked *placement* may change between the attempts of one "
        "run; every other field is *identity*: another value is another run. Durations are text with a unit: "
        "`100step`, `2e9tok`, `0.8run`; a cadence also takes `30s`, `30min`, `2h`.\n",
    ]
    for command, model in _ROOTS.items():
        out.append(f"\n## `{command}`\n\n{_first_line(model)}\n\n")
        out.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        out.extend(_rows(model, ""))
    return "".join(out)


def metrics_page() -> str:
    """Every metric name and every kind of event."""
    out = [
        _HEAD,
        "# Metrics and events\n\n",
        "A line of `metrics.jsonl` holds the step, the time, and values by these names. Composer's names are kept "
        "verbatim: its *batch* is a step here, its *sample* a sequence. `<...>` stands for one part of a name.\n\n",
        "| metric | unit | reduction | meaning |\n|---|---|---|---|\n",
    ]
    out += [f"| `{row.name}` | {row.unit} | {row.reduction} | {_escape(row.meaning)} |\n" for row in TABLE]
    out.append("\n## Events\n\nA line of `events.jsonl` holds the time, the attempt, the event and its own fields.\n\n")
    out.append("| event | meaning |\n|---|---|\n")
    out += [f"| `{kind}` | {_escape(meaning)} |\n" for kind, meaning in EVENTS.items()]
    return "".join(out)


def keys(model: type[BaseModel]) -> Iterator[str]:
    """Every dotted key of a config that can be written as ``a.b=value``."""
    for name, field in model.model_fields.items():
        yield name
        inner, suffix = _inner_model(field.annotation)
        if inner is not None and not suffix:
            yield from (f"{name}.{below}" for below in keys(inner))


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = prefix + name
        meaning = " ".join((field.description or "").split())
        if schema.is_placement(model, name):
            meaning += " *Placement.*"
        inner, suffix = _inner_model(field.annotation)
        kind = _kind(field) if inner is None else _section(field.annotation)
        yield f"| `{key}` | {kind} | {_default(field)} | {_escape(meaning)} |\n"
        if inner is not None:
            yield from _rows(inner, key + suffix + ".")


def _section(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        others = [
            each for each in typing.get_args(annotation) if _inner_model(each)[0] is None and each is not NoneType
        ]
        return " or ".join([*map(_words, others), "section"])
    return "list of sections" if origin is tuple else "map of sections" if origin is dict else "section"


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the config model inside an annotation, and the suffix of the key of its fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    suffix = {tuple: "[]", dict: ".<name>"}.get(origin, "")
    for argument in arguments:
        inner, below = _inner_model(argument)
        if inner is not None:
            return inner, suffix + below
    return None, ""


def _kind(field: FieldInfo) -> str:
    """Return the type in words, with its bounds."""
    for name, word in _KINDS.items():
        marker = typing.get_args(getattr(schema, name))[1]
        if any(entry is marker for entry in field.metadata):
            return word + _bounds(field)
    return _words(field.annotation) + _bounds(field)


def _words(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        for name, word in _KINDS.items():
            if annotation == getattr(schema, name):
                return word
        return _words(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join(_words(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        inner = [argument for argument in arguments if argument is not Ellipsis]
        return f"list of {_words(inner[0])}" if Ellipsis in arguments else f"{len(inner)} x {_words(inner[0])}"
    if origin is dict:
        return f"map of {_words(arguments[1])}"
    return str(getattr(annotation, "__name__", annotation))


def _bounds(field: FieldInfo) -> str:
    signs: dict[str, str] = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(entry, name):g}"
        for entry in field.metadata
        for name, sign in signs.items()
        if getattr(entry, name, None) is not None
    ]
    return f" ({', '.join(bounds)})" if bounds else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple | dict):
        return f"`{list(value) if not isinstance(value, dict) else value}`"
    if isinstance(value, str) and (not value or value != value.strip()):
        value = json.dumps(value)
    return f"`{value}`"


def _first_line(model: Callable[..., Any]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
