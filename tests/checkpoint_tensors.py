"""All tensors of a checkpoint, read by safetensors alone: the parts are put together by the ranges in their names."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def stored_tensors(checkpoint: str | Path) -> dict[str, Tensor]:
    """The tensors by name; each element is written once."""
    shards = Path(checkpoint) / "shards"
    shapes = {name: row["shape"] for name, row in json.loads((shards / "index.json").read_text())["tensors"].items()}
    tensors: dict[str, Tensor] = {}
    n_elements = 0
    for file in sorted(shards.glob("*.safetensors")):
        with safe_open(file, "pt") as parts:
            for key in parts.keys():  # noqa: SIM118  (not a mapping)
                name, _, ranges = key.partition("[")
                part = parts.get_tensor(key)
                whole = tensors.setdefault(name, torch.empty(shapes[name], dtype=part.dtype))
                place = tuple(slice(*map(int, text.split(":"))) for text in ranges.rstrip("]").split(",") if text)
                whole[place] = part
                n_elements += part.numel()
    assert tensors.keys() == shapes.keys()
    assert n_elements == sum(tensor.numel() for tensor in tensors.values())
    return tensors
