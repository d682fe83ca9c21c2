"""The process group of one attempt, and what its ranks do together.

A world that somebody else started (our agent, torchrun) is joined; alone, a world of one is made without any
socket. Every rendezvous key is prefixed by the attempt, so a restarted attempt never reads the addresses of a dead one
(gloo does, with torchrun's own shared store: docs/log.md).
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smalti.base.env import World
from smalti.base.errors import TryElsewhere, UserError

T = TypeVar("T")


def pick_device(choice: str, world: World) -> torch.device:
    """The device of this rank; ``auto`` takes CUDA where there is one."""
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


def join(world: World, device: torch.device, timeout_s: float) -> None:
    """Initialise torch.distributed for this rank; a no-op where it is initialised already.

    A collective that waits longer than ``timeout_s`` raises. With CUDA the group holds NCCL for device tensors and gloo
    for CPU tensors (votes, checkpoint plans).
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        try:
            store = dist.TCPStore(
                world.master_addr, world.master_port, world.world_size, world.rank == 0, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:
            raise TryElsewhere(
                f"rank {world.rank} could not meet the others at {world.master_addr}:{world.master_port}: {error}",
                hint="run the same command again; check that MASTER_ADDR and MASTER_PORT can be reached",
            ) from error
    prefixed = dist.PrefixStore(f"smalti/attempt-{world.attempt}", store)
    dist.init_process_group(backend, store=prefixed, rank=world.rank, world_size=world.world_size, timeout=timeout)


def from_first(work: Callable[[], T]) -> T:
    """What ``work`` gives rank 0, on every rank; they all raise what it raises. Only rank 0 does it."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except Exception as error:  # whatever it is: the others wait for an answer
            found[1] = _as_sent(error)
    dist.broadcast_object_list(found, src=0)
    result, failure = found
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives this rank; where it fails on any rank, all of them raise the first failure."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # whatever it is: the others wait for an answer
        failure = _as_sent(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for failed in filter(None, failures):
        raise failed
    return result  # type: ignore[return-value]


def _as_sent(error: Exception) -> Exception:
    """``error``, or what it says where it cannot be pickled and made anew."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return error


def leave() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
