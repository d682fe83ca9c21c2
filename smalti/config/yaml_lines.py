"""Parses YAML with the line of every key, and writes plain values as YAML.

Plain values are those of YAML 1.2 (``1e-3`` is a number; ``no``, ``on`` and ``2024-01-01`` are text). Duplicate keys
and anchors raise UserError; keys are always text; ``parse`` reads the output of ``to_yaml`` back equal.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from smalti.base.errors import UserError

Path = tuple[str | int, ...]

MAX_LEVELS = 50
"""Most levels of a YAML text; a config has about 8. Reading, merging and printing recurse once a level."""

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass
class Tree:
    """A parsed text: its plain value and, for each path in it, where it was written."""

    value: Any
    origins: dict[Path, str] = field(default_factory=dict)


def parse(text: str, label: str, *, lines: bool = True) -> Tree:
    """Read YAML; every path's origin is ``label:LINE`` (``label`` alone without ``lines``). Errors name that place."""

    def place(mark: Any) -> str:
        return f"{label}:{mark.line + 1}" if lines and mark is not None else label

    try:
        node = _compose(text)
    except RecursionError:
        raise _too_deep(label) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(
            f"{place(mark)}: not valid YAML: {error.problem or error.context}",
            hint="check the indentation and the quotes around here",
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"{label}: not valid YAML: {error}") from error
    tree = Tree(None)
    if node is not None:
        tree.value = _build(node, (), tree.origins, place, set())
    return tree


def _compose(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text by libyaml, ten times as fast, where PyYAML has it.

    What it refuses is read again by PyYAML itself, so that messages are the same everywhere.
    """
    loader = getattr(yaml, "CSafeLoader", None)
    if loader is not None:
        with suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=loader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _too_deep(where: str) -> UserError:
    return UserError(f"{where}: lists and sections are nested too deeply", allowed=f"{MAX_LEVELS} levels")


def _build(node: yaml.Node, path: Path, origins: dict[Path, str], place: Any, seen: set[int]) -> Any:
    where = place(node.start_mark)
    if len(path) > MAX_LEVELS:
        raise _too_deep(where)
    if id(node) in seen:
        raise UserError(
            f"{where}: {dotted(path)} repeats an anchor (&name, *name)",
            allowed="plain YAML without anchors",
            hint="write the value out, or share it through 'base: other.yaml'",
        )
    seen.add(id(node))
    origins.setdefault(path, where)
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node, path, origins, place, seen)
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*path, index), origins, place, seen) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _plain(node.value) if not node.style else node.value


def _build_mapping(node: yaml.MappingNode, path: Path, origins: dict[Path, str], place: Any, seen: set[int]) -> Any:
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        where = place(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{where}: a key of {dotted(path) or 'the file'} is a list or a mapping", allowed="text")
        key = str(key_node.value)
        child_path = (*path, key)
        if key in result:
            first = origins[child_path]
            raise UserError(
                f"{where}: the key {dotted(child_path)} is written twice (first at {first})",
                allowed="each key once",
                hint=f"delete one of the two lines '{key}:'",
            )
        origins[child_path] = where
        result[key] = _build(child, child_path, origins, place, seen)
    return result


def _plain(text: str) -> Any:
    """Return the value of an unquoted scalar under YAML 1.2's core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(
            text.replace("_", "")
            .replace(".inf", "inf")
            .replace(".Inf", "inf")
            .replace(".INF", "inf")
            .replace(".nan", "nan")
            .replace(".NaN", "nan")
            .replace(".NAN", "nan")
        )
    return text


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that YAML 1.1 or 1.2 would parse as another type, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = not isinstance(_plain(text), str) or text == ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(value: Any) -> str:
    """Return block-style YAML of plain values (dict, list, text, numbers, None), keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110, allow_unicode=True)


def inline(value: Any) -> str:
    """Return a value as one line of YAML: ``[0.9, 0.95]``, ``'1e3'``, ``null``."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def dotted(path: Path) -> str:
    """Return a path as a dotted key: ('data', 'stages', 0) -> 'data.stages.0'."""
    return ".".join(str(part) for part in path)


def paths_of(value: Any) -> list[Path]:
    """Return every path below a plain value."""
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [path for key, child in items for path in [(key,), *((key, *below) for below in paths_of(child))]]
