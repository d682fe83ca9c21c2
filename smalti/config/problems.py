"""Turns pydantic's validation errors into UserErrors: file and line, key, value, allowed values, the nearest key.

All descriptions of allowed values come from the JSON Schema of the config's class.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from smalti.base.errors import UserError, nearest
from smalti.config.schema import NotAllowed
from smalti.config.yaml_lines import Path, dotted, inline

_OTHER_NAMES = {
    "learning_rate": "train.optimizer.lr",
    "batch_size": "train.global_batch_tokens",
    "global_batch_size": "train.global_batch_tokens",
    "max_steps": "train.duration",
    "max_duration": "train.duration",
    "steps": "train.duration",
    "n_layers": "model.num_hidden_layers",
    "n_layer": "model.num_hidden_layers",
    "n_heads": "model.num_attention_heads",
    "n_head": "model.num_attention_heads",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "max_seq_len": "data.seq_len",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "grad_clip": "train.optimizer.clip_norm",
    "world_size": "train.parallel.ranks",
    "nproc_per_node": "train.parallel.ranks",
    "extends": "base",
    "defaults": "base",
    "include": "base",
}
"""Names of fields in other trainers -> Smalti's; used for hints only."""
_BASE = "base"
"""A key of every recipe that is no field of its config."""
_UNITS = {"steps": "step", "epochs": "ep", "epoch": "ep", "tokens": "tok", "token": "tok", "runs": "run", "sec": "s",
          "m": "min", "mins": "min", "minutes": "min", "hours": "h", "hour": "h", "hr": "h"}  # fmt: skip
"""Units as others write them -> those of durations; used for hints only."""
_MAX_SUGGESTIONS = 3
COMMAND_LINE = "command line"
"""The origin of a value from the command line."""


@dataclass(frozen=True)
class Problem:
    """One problem: message, allowed values, hint."""

    message: str
    allowed: str | None
    hint: str | None


class Schema:
    """Looks up paths in the JSON Schema of a config model."""

    def __init__(self, config_class: type[BaseModel]) -> None:
        self._root = config_class.model_json_schema()
        self._definitions: Mapping[str, Any] = self._root.get("$defs", {})

    def follow(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """Return the longest prefix of ``path`` in the schema, and its node.

        The names that pydantic inserts after a field whose value is a section or something else are left out.
        """
        node = self._resolve(self._root)
        known = []
        for part in path:
            step = self._step(node, part)
            if step is None and part in self._definitions and self.keys(node):
                continue
            if step is None:
                break
            node = step
            known.append(part)
        return tuple(known), node

    def keys(self, node: Mapping[str, Any]) -> list[str]:
        """Return the keys of a section; empty for a leaf or a free mapping."""
        for member in self._members(node):
            if "properties" in member:
                return list(member["properties"])
        return []

    def choices(self, node: Mapping[str, Any]) -> list[str]:
        """Return the named values that are allowed."""
        values = (value for member in self._members(node) for value in [*member.get("enum", []), member.get("const")])
        return [value for value in values if isinstance(value, str)]

    def all_paths(self) -> Iterator[str]:
        """Yield every dotted key of every section (except sections in lists)."""
        yield from self._walk(self._root, ())

    def describe(self, node: Mapping[str, Any]) -> str:
        """Return a description of the allowed values."""
        members = [self._describe_one(member) for member in self._members(node)]
        return ", or ".join(dict.fromkeys(members))

    def _walk(self, node: Mapping[str, Any], path: Path) -> Iterator[str]:
        for member in self._members(node):
            for key, child in member.get("properties", {}).items():
                yield dotted((*path, key))
                yield from self._walk(child, (*path, key))

    def _resolve(self, node: Mapping[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = {
                **self._definitions[node["$ref"].rsplit("/", 1)[1]],
                **{k: v for k, v in node.items() if k != "$ref"},
            }
        return dict(node)

    def _members(self, node: Mapping[str, Any]) -> list[dict[str, Any]]:
        resolved = self._resolve(node)
        return [self._resolve(member) for member in resolved["anyOf"]] if "anyOf" in resolved else [resolved]

    def _step(self, node: Mapping[str, Any], part: str | int) -> dict[str, Any] | None:
        for member in self._members(node):
            if isinstance(part, int):
                fixed = member.get("prefixItems", [])
                child = fixed[part] if part < len(fixed) else member.get("items")
            else:
                child = member.get("properties", {}).get(part, member.get("additionalProperties"))
            if isinstance(child, Mapping):
                return self._resolve(child)
        return None

    def _describe_one(self, node: Mapping[str, Any]) -> str:
        if "enum" in node or "const" in node:
            return ", ".join(inline(value) for value in node.get("enum", [node.get("const")]))
        kind = node.get("type")
        if kind == "string":
            examples = node.get("examples")
            form = f" that matches {node['pattern']}" if "pattern" in node else ""
            return f"a length such as {', '.join(examples)}" if examples else f"text{form}"
        if kind in ("integer", "number"):
            return ("a whole number" if kind == "integer" else "a number") + _bounds(node)
        if kind == "array":
            if "prefixItems" in node:
                return f"a list of {len(node['prefixItems'])}: " + "; ".join(map(self.describe, node["prefixItems"]))
            size = " of at least one" if node.get("minItems") else ""
            return f"a list{size}, each item {self.describe(node.get('items', {}))}"
        if kind == "object" and "properties" in node:
            return f"a section with the keys {', '.join(node['properties'])}"
        if kind == "object":
            names = "at least one name" if node.get("minProperties") else "names"
            names = ", ".join(map(inline, node.get("propertyNames", {}).get("enum", [names])))
            return f"a mapping of {names}, each to {self.describe(node.get('additionalProperties', {}))}"
        return {"boolean": "true or false", "null": "null"}.get(str(kind), "any value")


def _bounds(node: Mapping[str, Any]) -> str:
    words = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    parts = [f"{word} {inline(node[key])}" for key, word in words if key in node]
    return " " + " and ".join(parts) if parts else ""


_schema = cache(Schema)


def as_user_error(
    error: ValidationError, config_class: type[BaseModel], value: Any, origins: Mapping[Path, str], label: str
) -> UserError:
    """Return one UserError with all problems of a validation, in the order of the file."""
    schema = _schema(config_class)
    grouped: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        path, _ = schema.follow(item["loc"])
        if item["type"] == "extra_forbidden":
            path = (*schema.follow(item["loc"][:-1])[0], item["loc"][-1])
        if item["loc"][-1:] == ("[key]",):  # a wrong name in a mapping
            path = schema.follow(item["loc"][:-2])[0]
        grouped.setdefault(path, []).append(item)
    for path in _with_problems_inside(grouped):
        del grouped[path]
    problems = [_problem(schema, path, items[0], value, origins, label) for path, items in grouped.items()]
    if len(problems) == 1:
        return UserError(problems[0].message, allowed=problems[0].allowed, hint=problems[0].hint)
    lines = [f"{label}: {len(problems)} problems"]
    for problem in problems:
        lines.append(f"- {problem.message}")
        lines += [f"  allowed: {problem.allowed}"] if problem.allowed else []
        lines += [f"  hint: {problem.hint}"] if problem.hint else []
    return UserError("\n".join(lines))


def _with_problems_inside(grouped: Mapping[Path, list[Any]]) -> list[Path]:
    """Return the lists that are too short only because invalid items do not count, and the sections that, because of a
    problem inside, were taken for a number too."""
    paths = [path for path, items in grouped.items() if items[0]["type"] in ("too_short", "int_type")]
    return [path for path in paths if any(len(other) > len(path) and other[: len(path)] == path for other in grouped)]


def _problem(schema: Schema, path: Path, item: Any, value: Any, origins: Mapping[Path, str], label: str) -> Problem:
    where = _origin(path, origins, label)
    key = dotted(path)
    _, node = schema.follow(path)
    if item["type"] == "extra_forbidden":
        parent, parent_node = schema.follow(path[:-1])
        keys = [*schema.keys(parent_node), *([] if parent or where == COMMAND_LINE else [_BASE])]
        section = dotted(parent) or "the top level"
        entry = _at(value, path)
        typed = where == COMMAND_LINE and not isinstance(entry, dict | list)
        return Problem(
            f"{where}: unknown key {key} = {inline(entry)}",
            f"the keys of {section}: {', '.join(keys)}",
            _right_key(schema, path, keys, f"={inline(entry)}" if typed else ""),
        )
    if item["type"] == "missing":
        kind = schema.describe(node)
        place = "in that section" if path[1:] else "at the top level of the recipe"
        how = f"write '{path[-1]}:' {place}, or give {key}=VALUE"
        if isinstance(path[-1], int):
            how = f"write the whole list of {dotted(path[:-1])}"
        origin = _at(value, ("init_from",))
        if path[0] == "model" and origin:
            how = f"'smalti config model {origin}' prints the whole section; a recipe without one takes it from there"
        return Problem(f"{where}: {key} is missing", kind, how)
    if item["type"] == "value_error" and item.get("ctx"):
        error = item["ctx"]["error"]
        text = str(error)
        where = _typed_cause(path, text, value, origins) or where
        if isinstance(error, NotAllowed):
            return Problem(f"{where}: {key + ': ' if key else ''}{text}", error.allowed, error.hint)
        if schema.keys(node):
            return Problem(f"{where}: {key + ': ' if key else ''}{text}", None, None)
        return Problem(f"{where}: {key} = {inline(_at(value, path))}: {text}",
                       schema.describe(node), _right_value(schema, node, _at(value, path)))  # fmt: skip
    entry, allowed = _at(value, path), schema.describe(node)
    if isinstance(entry, float) and not math.isfinite(entry):
        allowed = re.sub(r"\ba number", "a finite number", allowed)
    return Problem(f"{where}: {key} = {inline(entry)} is not allowed", allowed, _right_value(schema, node, entry))


def _typed_cause(path: Path, text: str, value: Any, origins: Mapping[Path, str]) -> str | None:
    """Return the values of the command line that an error across the fields of a section names; None without one."""
    typed = [
        f"{dotted(at)}={inline(_at(value, at))}"
        for at, origin in origins.items()
        if origin == COMMAND_LINE and len(at) > len(path) and at[: len(path)] == path
        and not isinstance(_at(value, at), dict) and len(str(at[-1])) > 1
        and re.search(rf"(?<!\w){re.escape(str(at[-1]))}(?!\w)", text)
    ]  # fmt: skip
    return f"{COMMAND_LINE} ({', '.join(typed)})" if typed else None


def _right_value(schema: Schema, node: Mapping[str, Any], value: Any) -> str | None:
    """Return a hint with the allowed name nearest to ``value``, or with the unit of a duration (``step``)."""
    close = nearest(str(value), schema.choices(node))
    parts = re.fullmatch(r"([\d.]+)\s*([A-Za-z]+)", str(value))
    if close is None and parts and re.search(node.get("pattern", "^$"), as_written := _with_unit(*parts.groups())):
        close = as_written
    return f"did you mean '{close}'?" if close and close != str(value) else None


def _with_unit(number: str, unit: str) -> str:
    return number + _UNITS.get(unit.lower(), unit.lower())


def _right_key(schema: Schema, path: Path, siblings: list[str], value: str) -> str:
    """Return a hint: the field of another trainer's name, of the same name elsewhere, or of a similar name.

    ``value`` is appended to keys from the command line, so that the hint can be typed as it is.
    """
    name = str(path[-1])
    paths = list(schema.all_paths())
    same = [key for key in paths if key.rsplit(".", 1)[-1] == name]
    foreign = _OTHER_NAMES.get(name)
    sibling = nearest(name, siblings, alike_frac=0.6)
    close = [dotted((*path[:-1], sibling))] if sibling else []
    by_last = {key.rsplit(".", 1)[-1]: key for key in reversed(paths)}
    elsewhere = nearest(name, by_last, alike_frac=0.7)
    far = [by_last[elsewhere]] if elsewhere else []
    if foreign in paths or (foreign == _BASE and _BASE in siblings):
        return f"did you mean {foreign}?"  # without the value, whose unit may differ
    likely = same[:_MAX_SUGGESTIONS] or close or far
    return (
        f"did you mean {' or '.join(key + value for key in likely)}?"
        if likely
        else "delete it; 'smalti config schema' lists every key"
    )


def _origin(path: Path, origins: Mapping[Path, str], label: str) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return label


def _at(value: Any, path: Path) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
