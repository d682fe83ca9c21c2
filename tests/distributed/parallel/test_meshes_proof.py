"""Proof: on every mesh a run is that of one process, gradient norms included, dense and with experts, rows packed.

Dense: 1e-5 relative over 20 steps. Experts: the same with the choices of one process forced; with free routing 1e-5 up
to the first choice that differs, and 1e-3 after it.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
from conftest import PROVE

STEPS = 20 if PROVE else 8
CLOSE, AFTER = 1e-5, 1e-3

DATA = [{"shard": 2}, {"shard": 4}, {"shard": 8}, {"replicate": 2}, {"replicate": 2, "shard": 2},
        {"replicate": 4, "shard": 2}, {"replicate": 2, "shard": 4}]  # fmt: skip
SEQUENCE = [
    {"sequence": size, "context": context, **more}
    for context in ("ulysses", "ring")
    for size, more in ((2, {}), (4, {}), (2, {"shard": 2}), (4, {"shard": 2}), (2, {"replicate": 2, "shard": 2}))
]
SEQUENCE.append({"sequence": 2, "replicate": 2})
TENSOR = [{"tensor": 2}, {"tensor": 4}, {"tensor": 2, "shard": 2}, {"tensor": 2, "replicate": 2},
          {"tensor": 2, "replicate": 2, "shard": 2}, {"tensor": 2, "sequence": 2},
          {"tensor": 2, "sequence": 2, "context": "ring"}, {"tensor": 2, "sequence": 2, "shard": 2}]  # fmt: skip
PIPELINE = [
    {"pipeline": size, "pipeline_schedule": schedule, "microbatch_tokens": mesh_runs.SEQ_LEN, **more}
    for schedule in ("1f1b", "interleaved", "zero_bubble")
    for size, more in ((2, {}), (2, {"shard": 2}))
] + [
    {"pipeline": 4, "microbatch_tokens": mesh_runs.SEQ_LEN},
    {"pipeline": 2, "tensor": 2, "microbatch_tokens": mesh_runs.SEQ_LEN},
    {"pipeline": 2, "sequence": 2, "microbatch_tokens": mesh_runs.SEQ_LEN},
    {"pipeline": 2, "replicate": 2, "microbatch_tokens": mesh_runs.SEQ_LEN},
    {"pipeline": 2, "replicate": 2, "shard": 2, "microbatch_tokens": mesh_runs.SEQ_LEN},
]
EXPERT = [
    {"expert": expert, "dispatch": dispatch, **more}
    for dispatch in ("exact", "static")
    for expert, more in (
        (2, {"shard": 2}), (4, {"shard": 4}), (8, {"shard": 8}), (2, {"shard": 4}), (2, {"replicate": 2, "shard": 2}),
        (4, {"shard": 2, "sequence": 2}), (4, {"replicate": 2, "shard": 2, "sequence": 2}),
    )
] + [
    {"expert": 2, "shard": 2, "tensor": 2},
    {"expert": 2, "shard": 2, "pipeline": 2, "microbatch_tokens": mesh_runs.SEQ_LEN},
]  # fmt: skip

DENSE_MESHES = [*DATA, *SEQUENCE, *TENSOR, *PIPELINE]
MOE_MESHES = [*DENSE_MESHES, *EXPERT]
SAMPLE = [{"expert": 4, "dispatch": "exact", "shard": 2, "sequence": 2}]
"""In every run of the tests, with experts: the main road."""


def _name(parallel: dict[str, Any]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in parallel.items() if axis != "microbatch_tokens")


def _ranks(parallel: dict[str, Any]) -> int:
    ranks = 1
    for axis in ("replicate", "shard", "sequence", "tensor", "pipeline"):
        ranks *= parallel.get(axis, 1)
    return ranks


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, mesh_runs.Run]]:
    """Kind -> a folder with tokens, and the run of one process."""

    @cache
    def of(kind: str) -> tuple[Path, mesh_runs.Run]:
        root = tmp_path_factory.mktemp(kind)
        return root, mesh_runs.run_on(1, mesh_runs.config_of(root, kind, "one", STEPS), STEPS)

    return of


def _farthest(actual: list[float], expected: list[float]) -> float:
    return max((abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def _compared(kind: str, parallel: dict[str, Any], reference: Any, *, replay: bool) -> dict[str, Any]:
    root, single = reference(kind)
    ranks = _ranks(parallel)
    name = _name(parallel) + ("-replay" if replay else "")
    run = mesh_runs.run_on(
        ranks, mesh_runs.config_of(root, kind, name, STEPS, ranks, **parallel), STEPS, single, replay=replay
    )
    exact = STEPS if run.differs is None or replay else run.differs.step
    if run.differs is not None:
        print(f"{name}: the first choice that differs is of step {run.differs.step}, layer {run.differs.layer}")
    differences = {
        "mesh": name, "model": kind, "ranks": ranks, "replay": replay,
        "loss": _farthest(run.loss[:exact], single.loss[:exact]),
        "grad_norm": _farthest(run.grad_norm[:exact], single.grad_norm[:exact]),
        "after": _farthest(run.loss[exact:], single.loss[exact:]),
        "differs": None if run.differs is None else list(run.differs),
    }  # fmt: skip
    assert differences["loss"] <= CLOSE, differences
    assert differences["grad_norm"] <= CLOSE, differences
    assert differences["after"] <= AFTER, differences
    return differences


def _cases(kind: str) -> list[Any]:
    meshes = DENSE_MESHES if kind == "dense" else MOE_MESHES
    short = [] if kind == "dense" else SAMPLE
    return [pytest.param(kind, mesh, id=f"{kind}-{_name(mesh)}") for mesh in (meshes if PROVE else short)]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(("kind", "parallel"), [*_cases("dense"), *_cases("moe")])
def test_meshes_train_as_one_process(kind: str, parallel: dict[str, Any], reference: Any, record: Any) -> None:
    runs = [_compared(kind, parallel, reference, replay=False)]
    if runs[0]["differs"] or parallel in SAMPLE:  # where no choice differs, forcing them would change nothing
        runs.append(_compared(kind, parallel, reference, replay=True))
    record("meshes", {f"{kind} {_name(parallel)}": runs})
