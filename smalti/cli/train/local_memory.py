"""Whether a run fits the memory of the machine that would start it: a warning of ``smalti train --dry-run``.

Promises: the layout is the one that the dry run rehearses; GPUs as the driver lists them, main memory as the system and
its cgroup limit it; of ranks on a GPU that is not here nothing is said.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout


def memory_warning(config: "RunConfig", *, ranks: int) -> str | None:
    """What a rank needs beside what it would have here, and the cheapest change that would help; None where it fits."""
    from smalti.cli.train.local_layout import local_layout
    from smalti.cost.memory.fit import tensor_bytes_on_cpu
    from smalti.fleet import machine

    if ranks != config.train.parallel.ranks:  # of the world that another launcher made
        parallel = config.train.parallel.model_copy(update={"ranks": ranks})
        config = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    layout = local_layout(config, ranks).layout
    devices = [] if config.train.parallel.device == "cpu" else machine.gpus()["devices"]
    sizes = [device["memory_bytes"] for device in devices if device["memory_bytes"]]
    if sizes:
        return _warning(config, layout, min(sizes), devices[0]["name"], "cuda")
    if config.train.parallel.device == "cuda":
        return None
    found = machine.memory()
    whole = min(found["total_bytes"], found["cgroup_limit_bytes"] or found["total_bytes"])
    part = "this machine" if ranks == 1 else f"its part of this machine, one of {ranks},"
    return _warning(config, layout, tensor_bytes_on_cpu(whole, ranks), part, "cpu")


def _warning(config: "RunConfig", layout: "Layout", memory_bytes: float, name: str, device: str) -> str | None:
    from smalti.base.units import format_bytes
    from smalti.cost.memory.fit import largest_microbatch, memory_fixes
    from smalti.cost.memory.rank import memory_per_rank

    needed = memory_per_rank(config, layout=layout, device=device).total_bytes
    if needed <= memory_bytes:
        return None
    is_auto = config.train.microbatch_tokens == "auto"
    if is_auto and largest_microbatch(config, memory_bytes, layout, device=device) is not None:
        return None  # it will take less at a time
    found = memory_fixes(config, memory_bytes, layout, device=device)
    cure = f"would fit: {found[0].change}" if found else "neither a smaller microbatch nor recomputation would help"
    has = f"{name} has {format_bytes(memory_bytes)} for tensors"
    return f"memory: a rank needs {format_bytes(needed)} (smalti plan memory), {has}; {cure}"
