"""Proof: a checkpoint of any mesh continues on any other, at any step, in the middle of a curriculum.

On the same mesh the continued run is that without a stop, to the bit; on another one it keeps the bounds of
``test_meshes_proof.py`` against one process, with the choices of its experts forced. Loaded and saved on another mesh
without a step between, a checkpoint has the same tensors.
"""

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import torch
from checkpoint_tensors import stored_tensors
from conftest import PROVE
from test_meshes_proof import CLOSE, DENSE_MESHES, MOE_MESHES, _farthest, _name, _ranks

from smalti.track.checkpoints.names import folder_name

STEPS = 10 if PROVE else 4
SAMPLE = ({"expert": 2, "shard": 2}, {"tensor": 2})


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, mesh_runs.Run]]:
    """The run of one process on each kind of model."""

    @cache
    def of(kind: str) -> tuple[Path, mesh_runs.Run]:
        root = tmp_path_factory.mktemp(kind)
        return root, mesh_runs.run_on(1, mesh_runs.config_of(root, kind, "single", STEPS), STEPS)

    return of


def _assert_same(one: Path, other: Path) -> None:
    first, second = stored_tensors(one), stored_tensors(other)
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def _pair(kind: str, first: dict[str, Any], second: dict[str, Any], at: int, single: Any) -> dict[str, Any]:
    root, reference = single(kind)
    name = f"{_name(first)}-to-{_name(second)}"
    configs = [mesh_runs.config_of(root, kind, name, STEPS, _ranks(mesh), **mesh) for mesh in (first, second)]
    run, kept = Path(configs[0].run_folder), root / f"{name}-kept"
    for folder in (run, kept, root / f"{name}-second", root / f"{name}-third"):  # the same pair may be drawn twice
        shutil.rmtree(folder, ignore_errors=True)

    def train(number: int, steps: int, save_to: Path | None = None) -> mesh_runs.Run:
        ranks = _ranks((first, second)[number])
        return mesh_runs.run_on(ranks, configs[number], steps, reference, replay=kind == "moe", save_to=save_to)

    def again() -> None:
        shutil.rmtree(run)
        shutil.copytree(kept, run)

    whole = train(0, STEPS)
    shutil.rmtree(run)
    train(0, at, run / "checkpoints")
    shutil.copytree(run, kept)
    continued = train(0, STEPS)
    assert (continued.loss, continued.grad_norm) == (whole.loss[at:], whole.grad_norm[at:]), (
        "to the bit on its own mesh"
    )
    again()
    moved = train(1, STEPS)
    figures = {
        "model": kind, "from": _name(first), "to": _name(second), "step": at,
        "loss": _farthest(moved.loss, reference.loss[at:]),
        "grad_norm": _farthest(moved.grad_norm, reference.grad_norm[at:]),
    }  # fmt: skip
    assert figures["loss"] <= CLOSE, figures
    assert figures["grad_norm"] <= CLOSE, figures
    again()
    train(1, at, root / f"{name}-second")
    _assert_same(kept / "checkpoints" / folder_name(at), root / f"{name}-second" / folder_name(at))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(root / f"{name}-second", run / "checkpoints")
    train(0, at, root / f"{name}-third")
    _assert_same(kept / "checkpoints" / folder_name(at), root / f"{name}-third" / folder_name(at))
    return figures


@pytest.mark.slow  # eight worlds
def test_a_checkpoint_of_any_mesh_continues_on_any_other(single: Any, proof: Any, record: Any) -> None:
    pairs = proof(short=1, full=30)
    generator = random.Random(7)
    rows = []
    for number in range(pairs):
        kind = ("moe", "dense")[number % 2]
        first, second = generator.sample(MOE_MESHES if kind == "moe" else DENSE_MESHES, 2) if PROVE else SAMPLE
        rows.append(_pair(kind, first, second, generator.randrange(2, STEPS - 1), single))
        print(rows[-1])
    record("checkpoint_pairs", {"pairs": rows})
