"""Formats a config as text: YAML that loads back equal, YAML with the origin of each value, JSON Schema."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smalti.config.depth import PATTERN
from smalti.config.find import preset_names
from smalti.config.model import ModelConfig
from smalti.config.schema import Config
from smalti.config.yaml_lines import Path, dotted, inline, to_yaml

if TYPE_CHECKING:
    from smalti.config.load import Loaded


def dump(config: Config) -> str:
    """Return the resolved config as YAML; loading it gives an equal config."""
    return to_yaml(config.model_dump(mode="json"))


def show(loaded: "Loaded[Any]") -> str:
    """Return the resolved config as YAML with the origin of each value in a comment."""
    lines: list[tuple[str, str]] = []
    _show(loaded.config.model_dump(mode="json"), (), loaded.origins, lines)
    width = min(max((len(text) for text, _ in lines), default=0), 70)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines) + "\n"


def json_schema(model: type[Config]) -> dict[str, Any]:
    """Return the JSON Schema of the YAML, for editors. No key is ``required``: a base or a preset may supply any."""
    schema = model.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for section in [schema, *schema.get("$defs", {}).values()]:
        section.pop("required", None)
    schema["properties"] = {
        "base": {"type": "string", "description": "A recipe (path or name) whose keys this file overrides."},
        **schema["properties"],
    }
    holder = schema if model is ModelConfig else schema.get("$defs", {}).get("ModelConfig")
    if holder is not None:
        preset = {
            "anyOf": [{"enum": preset_names()}, {"type": "string", "pattern": f"^{PATTERN}$"}],
            "description": "A named model size whose fields the others override; depth-N also sets train.",
        }
        holder["properties"] = {"preset": preset, **holder["properties"]}
    return schema


def flatten(value: Any, path: Path = ()) -> dict[str, Any]:
    """Return the leaves of nested plain values by dotted key; lists of plain values and empty containers are leaves."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        children = list(enumerate(value))
    if not children:
        return {dotted(path): value}
    return {key: leaf for part, child in children for key, leaf in flatten(child, (*path, part)).items()}


def _show(value: Any, path: Path, origins: Mapping[str, str], lines: list[tuple[str, str]]) -> None:
    indent = "  " * len(path)
    for key, child in value.items() if isinstance(value, dict) else ():
        child_path = (*path, key)
        name = inline(key)
        if isinstance(child, dict) and child:
            lines.append((f"{indent}{name}:", ""))
            _show(child, child_path, origins, lines)
        elif isinstance(child, list) and any(isinstance(item, dict) for item in child):
            lines.append((f"{indent}{name}:", ""))
            for index, item in enumerate(child):
                start = len(lines)
                _show(item, (*child_path, index), origins, lines)
                text, origin = lines[start]
                bare = len(indent) + 2
                lines[start] = (f"{text[:bare]}- {text[bare + 2 :]}", origin)
        else:
            lines.append((f"{indent}{name}: {inline(child)}", origins.get(dotted(child_path), "")))
