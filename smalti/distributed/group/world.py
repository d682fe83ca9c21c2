"""The process group of one attempt, and work that its ranks do together.

A world that was started by our agent, torchrun or srun is joined; otherwise a world of one is made without any socket.
Before any collective the ranks shake hands (``handshake.py``).
"""

import os
import pickle
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from smalti import __version__
from smalti.base.env import World, gloo_interface, grow_gpu_segments, set_gloo_interface
from smalti.base.errors import RetryableError, UserError
from smalti.distributed.group.handshake import Card, meet

T = TypeVar("T")
_BACKGROUND = "background"
"""The description of process groups of threads beside training."""


class RaisedOnAllRanks(Exception):
    """The ``__cause__`` of an error that all ranks raise at the same place: ``raise error from RaisedOnAllRanks(why)``.

    The ranks can still communicate after such an error (``may_leave``). ``cause``: that of the error, so that a
    traceback still shows it.
    """

    def __init__(self, why: str, cause: BaseException | None = None) -> None:
        super().__init__(why)
        self.__cause__ = cause


def pick_device(choice: str, world: World) -> torch.device:
    """Return the device of this rank; ``auto`` is CUDA where available."""
    if choice != "cpu":
        grow_gpu_segments()
    has_cuda = torch.cuda.is_available()
    if choice == "cuda" and not has_cuda:
        raise UserError(
            "train.parallel.device=cuda, but torch sees no CUDA device",
            allowed="auto, cpu",
            hint="train.parallel.device=auto",
        )
    if choice == "cpu" or not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(
    world: World,
    device: torch.device,
    timeout_s: float,
    *,
    join_timeout_s: float = 60.0,
    same: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    trouble: str | None = None,
) -> tuple[str, ...]:
    """Initialise torch.distributed for this rank, unless the caller has, and return the host of each rank.

    A world of one has no hosts. A collective that waits longer than ``timeout_s`` raises; ranks wait ``join_timeout_s``
    for each other. Every rendezvous key is prefixed by the attempt, so a restarted attempt never reads the addresses of
    a dead one (gloo does, with torchrun's own shared store: docs/log.md). With CUDA the group holds NCCL for device
    tensors and gloo for CPU tensors (votes, checkpoint plans). same, config, trouble: facts of this rank for the
    handshake, beside versions and kind of device (``handshake.Card``); a process group that the caller has initialised
    is taken without one.
    """
    if dist.is_initialized():
        return _gather_hosts()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    hosts: tuple[str, ...] = ()
    if world.world_size == 1:
        if trouble is not None:
            raise UserError(trouble)
        store: dist.Store = dist.HashStore()
    else:
        store = dist.PrefixStore(f"smalti/attempt-{world.attempt}", _connect(world, join_timeout_s))
        alike = {"smalti": __version__, "torch": torch.__version__, "ranks": world.world_size, "device": device.type}
        card = Card(socket.gethostname(), os.getpid(), {**alike, **(same or {})}, trouble)
        handshake = dist.PrefixStore("handshake", store)
        hosts = meet(handshake, world.rank, world.world_size, card, config or {}, join_timeout_s)
        if len(set(hosts)) > 1:
            _choose_interface(world)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
    return hosts


def _gather_hosts() -> tuple[str, ...]:
    if dist.get_world_size() == 1:
        return ()
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return tuple(hosts)


def _connect(world: World, timeout_s: float) -> dist.Store:
    """Return the store at the world's address; rank 0 holds it, unless the launcher does."""
    holds = world.rank == 0 and not world.store_is_up
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(
            world.master_addr, world.master_port, world.world_size, holds, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        address = f"{world.master_addr}:{world.master_port}"
        if holds:
            text = f"rank 0 cannot hold the store of this attempt at {address}: {error}"
            hint = "run the same command again; MASTER_PORT chooses another port"
        else:
            text = f"rank {world.rank} cannot reach rank 0 at {address} in {timeout_s:g} s: it did not start or is gone"
            hint = "look at the log of rank 0, and whether MASTER_ADDR and MASTER_PORT can be reached from this host"
        raise RetryableError(text, hint=hint) from error


def _choose_interface(world: World) -> None:
    """Set gloo's interface to the one that reaches rank 0 if the host's name is a loopback address (127.0.1.1 on
    Debian), which gloo would send to other hosts; not if the user has named an interface."""
    if gloo_interface() is not None:
        return
    try:
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    except OSError:  # the name has no address at all
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((world.master_addr, world.master_port))
        except OSError:
            return
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses) and not address.startswith("127."):
            set_gloo_interface(name)


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank; all ranks raise what it raises."""
    result_and_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result_and_error[0] = work()
        except Exception as error:  # any error: the others wait for the result
            result_and_error[1] = _as_sent(error)
    dist.broadcast_object_list(result_and_error, src=0)
    result, failure = result_and_error
    if failure is not None:
        raise failure from RaisedOnAllRanks("rank 0 failed", failure.__cause__)
    return result  # type: ignore[no-any-return]


def together(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and return this rank's result; where it fails on any, all raise the first failure."""
    if not dist.is_initialized():
        return work()
    result = None
    failure = None
    try:
        result = work()
    except Exception as error:  # any error: the others wait for the result
        failure = _as_sent(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, failed in enumerate(failures):
        if failed is not None:
            raise failed from RaisedOnAllRanks(f"rank {rank} failed", failed.__cause__)
    return result  # type: ignore[return-value]


def _as_sent(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return error


def background_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for a thread beside training, None for a world of one. A collective.

    Its collectives are not counted: ranks start them at other moments, whatever their training does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timeout, group_desc=_BACKGROUND)


def count_collectives() -> int:
    """Return the number of collectives that this rank's training has started, over all process groups."""
    return sum(collectives_by_group().values())


def collectives_by_group() -> dict[str, int]:
    """Return the number of collectives that this rank's training has started, by the name of the process group."""
    if not dist.is_initialized():
        return {}
    names: Any = dist.distributed_c10d._world.pg_names
    groups = [(name, group) for group, name in list(names.items()) if group.group_desc != _BACKGROUND]
    return {name: group._get_sequence_number_for_group() for name, group in groups}


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(items: list[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the items of all ranks in the order of ranks, on every rank. group: one of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items, group)
    return [item for part in parts for item in part]


def first_failure(failure: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the first failure of any rank, on all ranks. group: one of all ranks."""
    return next((text for text in gather([failure], group) if text is not None), None)


def may_leave(error: BaseException | None) -> bool:
    """Return whether the ranks can still communicate after ``error``.

    After an error that one rank alone has raised, the others wait in a collective, and destroying the group would wait
    for them; with NCCL, forever.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return alone or error is None or isinstance(error.__cause__, RaisedOnAllRanks)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
