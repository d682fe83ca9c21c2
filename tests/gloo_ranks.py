"""Run a function on several gloo ranks of this machine, for tests.

Ranks are forked by a server of their own, which has imported torch and started no thread: an OpenMP pool that another
test left in this process would not survive a fork, and its first parallel region would wait for ever. They meet through
a file, so no port can clash. Functions and their arguments are pickled: functions of modules only.
"""

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smalti.train import rank_setup

_IMPORTED_ONCE = [
    "torch.distributed", "torch._dynamo", "smalti.train.job", "smalti.tune.run", "smalti.evals.in_loop_suite",
    "smalti.cli.train.preflight", "pytest", "hypothesis",
]  # fmt: skip
"""By the server: what a module of tests imports beside, each of its ranks imports again."""

_LEAVE = "leave"
"""File that is there once all ranks are through."""


def server() -> Any:
    """The context of multiprocessing whose processes are forked by the server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120, together: bool = True
) -> list[Any]:
    """``[function(rank, *args) for each rank]``, each in a process of its own inside one gloo group.

    together: a rank stays until all are through, because one may still be connecting a group that others have done
    with. Otherwise it leaves at once, for tests of ranks that lose another one.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, function, args)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        until = time.monotonic() + timeout_s
        while (
            together and not all(_is_through(folder, *each) for each in enumerate(ranks)) and time.monotonic() < until
        ):
            time.sleep(0.002)
        open(os.path.join(folder, _LEAVE), "w").close()
        for process in ranks:
            process.join(max(0.1, until - time.monotonic()))
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} of {world_size} ranks did not end within {timeout_s} s"
        results = []
        for rank in range(world_size):
            with open(os.path.join(folder, f"result-{rank}"), "rb") as file:
                kind, value = pickle.load(file)
            assert kind == "value", f"rank {rank} failed:\n{value}"
            results.append(value)
        return results


def exit_code(function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> int:
    """Run ``function(*args)`` in a process of its own, a world of one; returns its exit code, -9 if it was killed."""
    process = server().Process(target=_alone, args=(function, args))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _alone(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    set_up()
    function(*args)
    os._exit(0)


def set_up() -> None:
    """Prepare a process that the server has forked."""
    gc.freeze()  # a collection of what the server imported would copy its pages
    torch.set_num_threads(1)
    # How fast this CPU multiplies would take each rank a second and more, and is of no matter for tests.
    rank_setup.matmul_rate = lambda device, precision: (1e11, 1024)  # type: ignore[attr-defined]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    set_up()
    number, size = str(rank), str(world_size)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        dist.barrier()  # a rank that fails at once must not leave while another is still connecting: that one hangs
        result: tuple[str, Any] = ("value", function(rank, *args))
    except BaseException:
        result = ("error", traceback.format_exc())
    written = os.path.join(folder, f"result-{rank}")
    with open(written + ".part", "wb") as file:
        pickle.dump(result, file)
    os.rename(written + ".part", written)
    if result[0] == "value":
        _wait_to_leave(folder)
    os._exit(0)  # no clean-up of what the server forked


def _is_through(folder: str, rank: int, process: Any) -> bool:
    return os.path.exists(os.path.join(folder, f"result-{rank}")) or not process.is_alive()


def _wait_to_leave(folder: str) -> None:
    """Return when every rank is through or gone."""
    until = time.monotonic() + 120
    while not os.path.exists(os.path.join(folder, _LEAVE)) and time.monotonic() < until:
        time.sleep(0.002)
