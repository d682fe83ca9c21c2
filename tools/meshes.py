"""The page of meshes: how ranks are laid out, and the table of ``make prove meshes`` from bench/results/meshes.json."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results" / "meshes.json"

_INTRO = """<!-- Written by `make docs` from tools/meshes.py and bench/results/meshes.json; edit there. -->
# Meshes

A device mesh arranges the ranks of a job along axes, one for each kind of parallelism. Large models need several axes
at once, and each combination must train the same model. In Smalti every rank has a place on one mesh
(`smalti/distributed/group/mesh.py`); each mesh below is compared with one process. Its axes, from the outermost:

    pipeline  x  replicate  x  [ shard x sequence  =  expert_shard x expert ]  x  tensor

| axis | its ranks share | and exchange |
|---|---|---|
| `pipeline` | the layers | activations and their gradients, between neighbours |
| `replicate` | nothing: copies of the sharded model (HSDP) | gradients |
| `shard` | weights, gradients, moments (FSDP2) | weights before they are used, gradients |
| `sequence` | each row of tokens; weights too | heads for tokens (`ulysses`), or keys and values (`ring`) |
| `expert` | the experts of a layer; these are ranks of shard x sequence | tokens, to their experts and back |
| `tensor` | each matrix | activations, twice in attention and twice in an MLP |

Sizes are `train.parallel.AXIS`; `shard` is what the others leave. A loss is a sum over tokens, gradients are summed
over all ranks, and the step alone divides, by the number of tokens of the whole batch: so the mesh does not change
the result. [Expert](expert-parallel.md), [sequence](sequence-parallel.md), [tensor](tensor-parallel.md)
and [pipeline](pipeline-parallel.md) parallelism have pages of their own; [the guide](../../guides/scale.md) says how to
choose. [Adapters](../../guides/adapters.md) are trained on the same meshes.

## Every mesh against one process

`make prove meshes`: 20 steps of a small model on gloo, rows packed with documents, fp32; the largest relative
difference of the loss and of the gradient norm of any step from those of one process. With experts, the first router
choice that differs, if any, is named: up to it the bound is 1e-5, after it 1e-3; with the choices of one process
forced it is 1e-5 throughout. `make test` runs a sample.

AdamW has `eps: 1e-6` here. With the usual 1e-8, an element whose first gradient is 8e-9 moves by its rounding
error, and one process with smaller microbatches is already 1.7e-5 of a gradient norm away from one with larger ones;
meshes with as many rows at a time as the one process stayed within 1e-6 even then.

"""

_HEAD = """| mesh | model | ranks | loss | gradient norm | first other choice | with forced choices |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of docs/concepts/distributed/meshes.md."""
    if not RESULTS.exists():
        return _INTRO + "Not run yet.\n"
    result = json.loads(RESULTS.read_text())
    rows = [value for value in result["figures"].values() if isinstance(value, list)]
    text = _HEAD + "".join(_row(runs) for runs in sorted(rows, key=lambda runs: (runs[0]["model"], runs[0]["ranks"])))
    worst = max(max(runs[0]["loss"], runs[0]["grad_norm"]) for runs in rows)
    torch = result["machine"]["torch"]
    summary = f"{len(rows)} meshes, {result['date'][:10]}, torch {torch}; largest difference {worst:.1e}.\n"
    return f"{_INTRO}{text}\n{summary}"


def _row(runs: list[dict[str, Any]]) -> str:
    free, forced = runs[0], runs[1] if len(runs) > 1 else None
    differs = "none" if free["differs"] is None else f"step {free['differs'][0]}, layer {free['differs'][1]}"
    last = "" if forced is None else f"{max(forced['loss'], forced['grad_norm']):.1e}"
    cells = [
        free["mesh"].replace("-", " "), free["model"], str(free["ranks"]), f"{free['loss']:.1e}",
        f"{free['grad_norm']:.1e}", differs if free["model"] == "moe" else "", last,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"
