"""The identity of a run: all fields of its config that are not declared with ``placement``.

Two configs of equal identity train the same model from the same data in the same order; where and how fast may differ.
``auto`` stays ``auto`` here: its resolution on a machine is an event, not a part of the config.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from smalti.config.schema import Config, is_placement
from smalti.config.show import flatten
from smalti.config.yaml_lines import Path, dotted, inline

ABSENT = "absent"


def identity(config: Config) -> dict[str, Any]:
    """Return the identity fields as nested plain values, without sections that have none."""
    values = {
        name: _plain(getattr(config, name))
        for name in type(config).model_fields
        if not is_placement(type(config), name) and not _only_placement(getattr(config, name))
    }
    return values


def difference(before: Config, after: Config) -> list[str]:
    """Return the differences in identity, a line each: ``train.optimizer.lr: 0.003 -> 0.004``. Empty: the same run.

    Lists of sections are compared item by item: ``data.stages.1: absent -> {weights: ...}``.
    """
    return _lines(identity(before), identity(after))


def placement_difference(before: Config, after: Config) -> list[str]:
    """Return the differences in placement, a line each."""
    changed = _lines(before.model_dump(mode="json"), after.model_dump(mode="json"))
    of_identity = {_key(line) for line in difference(before, after)}
    return sorted(line for line in changed if _key(line) not in of_identity)


def differing(configs: Sequence[Config]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the differing values by dotted key, in the order of ``configs``: those of identity, those of placement."""
    of_identity = {key for config in configs for key in flatten(identity(config))}
    rows = differing_rows([flatten(config.model_dump(mode="json")) for config in configs])
    return (
        {key: values for key, values in rows.items() if key in of_identity},
        {key: values for key, values in rows.items() if key not in of_identity},
    )


def differing_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each key that differs between rows, in their order; ``absent`` where a row lacks the key."""
    keys = dict.fromkeys(key for row in rows for key in row)
    values_of = {key: [row.get(key, ABSENT) for row in rows] for key in keys}
    return {key: values for key, values in values_of.items() if any(value != values[0] for value in values[1:])}


def _key(line: str) -> str:
    return line.partition(": ")[0]


def _lines(before: Any, after: Any, path: Path = ()) -> list[str]:
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and before and after:
        keys = [*before, *(key for key in after if key not in before)]
        pairs: list[tuple[Any, Any, str | int]] = [(before.get(k, ABSENT), after.get(k, ABSENT), k) for k in keys]
    elif _sections(before) and _sections(after):
        pairs = [(old, new, index) for index, (old, new) in enumerate(zip_longest(before, after, fillvalue=ABSENT))]
    else:
        return [f"{dotted(path)}: {_text(before)} -> {_text(after)}"]
    return [line for old, new, part in pairs for line in _lines(old, new, (*path, part))]


def _sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _text(value: Any) -> str:
    return ABSENT if value is ABSENT else inline(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return identity(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _only_placement(value: Any) -> bool:
    return isinstance(value, Config) and not identity(value)
