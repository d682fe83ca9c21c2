"""The probe of a machine: it measures every kind of work of a step, and its failures are reported."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from example_config import example_config
from synthetic_machine import machine as synthetic_machine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smalti.base.errors import SmaltiError, UserError
from smalti.cli.plan.measure import measure as measure_here
from smalti.cli.plan.measure import write
from smalti.config.hardware import hardware
from smalti.config.measured import Measured
from smalti.config.optimizer import OPTIMIZERS, OptimizerConfig, OptimizerName
from smalti.cost.step_time.step import step_time
from smalti.cost.step_time.work import KINDS
from smalti.distributed.group import allocator
from smalti.fleet import measure
from smalti.fleet.probes import gpu, machine
from smalti.train.optim import build_optimizer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIDES", (16, 32))
    monkeypatch.setattr(machine, "ELEMENTS", (2**12, 2**13))
    monkeypatch.setattr(machine, "ROWS", (128, 256))
    monkeypatch.setattr(machine, "HEAD_WIDTHS", (16, 32))
    monkeypatch.setattr(machine, "_REPEATS", 3)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: True)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_probe_measures_every_kind_of_work() -> None:
    before = torch.get_num_threads()
    try:
        measured = Measured.model_validate(machine.measure(1))
    finally:
        torch.set_num_threads(before)
    assert measured.threads == 1
    for name in ("bf16", "fp32"):
        assert set(measured.kernels[name]) == set(KINDS)
        assert all(seconds > 0 for points in measured.kernels[name].values() for _, seconds in points)
        assert len(measured.matmul[name]["tn"]) == 8
    device = synthetic_machine().model_copy(update={"measured": measured})
    assert step_time(example_config(), device).total_s > 0


def test_what_a_gpu_is_measured_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: no GPU was at hand."""
    measured = gpu.measure(torch.device("cpu"), (32, 64), 2**20)
    assert measured["peak_flops_per_s"].keys() == {"bf16", "fp32"}
    assert min(*measured["peak_flops_per_s"].values(), measured["memory_bytes_per_s"]) > 0
    answer = {"name": "Some GPU", "kind": "cuda", "memory_bytes": 2**34, **measured}
    monkeypatch.setattr(measure, "run_probe", lambda *arguments: answer)
    device = measure.measured_gpu()
    assert (device.title, device.kind, device.devices_per_node) == ("Some GPU", "cuda", 1)
    assert step_time(example_config(), device).total_s > 0
    monkeypatch.setattr(measure, "run_probe", lambda *arguments: {"problem": "PyTorch sees no GPU here"})
    with pytest.raises(UserError, match="sees no GPU"):
        measure_here(None, None, "cuda")
    with pytest.raises(UserError, match="no effect on a GPU"):
        measure_here(None, 2, "cuda")


class _Ops(TorchDispatchMode):
    """The operators that torch calls inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_launch_the_kernels_of_training(name: OptimizerName) -> None:
    model = nn.ParameterList(torch.randn(8) for _ in range(8))
    for weight in model:
        weight.grad = torch.randn(8)
    trained = build_optimizer(model, OptimizerConfig(name=name, lr=1e-9)).step
    probed = dict(machine._of_parameters(64, torch.device("cpu")))[name]
    ops = []
    with torch.no_grad():
        for update in (trained, probed):
            update()  # torch's AdamW allocates its moments in the first
            with _Ops() as launched:
                update()
            ops.append(launched.names)
    assert ops[0] == ops[1] != []


def test_operands_lie_as_a_linear_layer_has_them() -> None:
    for kind, strides in {"nt": ((8, 1), (1, 8)), "nn": ((8, 1), (4, 1)), "tn": ((1, 2), (4, 1))}.items():
        left, right = machine._operands(kind, (2, 8, 4), torch.device("cpu"), torch.float32)
        assert (left.shape, right.shape) == ((2, 8), (8, 4))
        assert (left.stride(), right.stride()) == strides, kind


def test_a_smaller_size_never_takes_longer() -> None:
    assert machine._rising([[1, 3.0], [2, 2.0], [3, 4.0]]) == [[1, 2.0], [2, 2.0], [3, 4.0]]
    assert machine._shorter({"a": [[1, 2.0], [2, 9.0]]}, {"a": [[1, 3.0], [2, 4.0]]}) == {"a": [[1, 2.0], [2, 4.0]]}


def test_a_saved_machine_is_a_device(tmp_path: Path) -> None:
    path = str(tmp_path / "machine.yaml")
    write(synthetic_machine(), path)
    assert hardware(path) == synthetic_machine()
    assert "&id" not in Path(path).read_text()


@pytest.mark.slow
def test_a_probe_that_fails_says_why() -> None:
    lines: list[str] = []
    with pytest.raises(SmaltiError, match="invalid choice"):
        measure.run_probe("machine", ["--format", "fp7"], {}, 60.0, lines.append)
    assert any("usage" in line for line in lines)
    with pytest.raises(SmaltiError, match="did not end within"):
        measure.run_probe("all_reduce", [], {}, 0.01)


@pytest.mark.slow
def test_a_probe_ends_with_its_caller() -> None:
    """A closed terminal: the caller's error is raised at once, not at the limit, and no process is left."""
    began_s = time.monotonic()

    def report(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        measure.run_probe("machine", ["--format", "fp32"], {}, 300.0, report)
    assert time.monotonic() - began_s < 100
    assert not [child for child in psutil.Process().children() if "smalti.fleet.probes.machine" in child.cmdline()]
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread.is_alive()]


@pytest.mark.exhaustive
def test_this_machine_as_a_device() -> None:
    lines: list[str] = []
    device = measure.measured_machine(threads=1, formats=("fp32",), report=lines.append)
    assert device.kind == "cpu"
    assert device.peak_flops_per_s.keys() == {"fp32"}
    assert "matrix products in fp32, 1 of 2" in lines
    assert device.measured is not None
    assert step_time(example_config("train.precision.compute=fp32"), device).total_s > 0


@pytest.mark.parametrize(
    ("save", "threads", "text"),
    [("machine.txt", None, "ends with .yaml"), ("nowhere/machine.yaml", None, "make it first"), (None, 0, "1 or more")],
)
def test_a_measurement_that_cannot_be_saved_does_not_begin(save: str | None, threads: int | None, text: str) -> None:
    with pytest.raises(UserError) as caught:
        measure_here(save, threads)
    assert text in f"{caught.value.allowed} {caught.value.hint}"
