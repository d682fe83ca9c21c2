"""Checks whether a run fits the memory of this machine: a warning of ``smalti train --dry-run``.

Uses the layout that the dry run rehearses, GPUs as the driver lists them, and main memory within the cgroup limit.
Ranks on a GPU that this machine does not have are not checked.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.cost.axes import Layout


def memory_warning(config: "RunConfig", *, ranks: int) -> str | None:
    """Return the memory that a rank needs and has on this machine, with the cheapest fix; None where it fits."""
    from smalti.cli.train.local_layout import local_layout
    from smalti.cost.memory.fit import tensor_bytes_on_cpu
    from smalti.fleet import machine

    if ranks != config.train.parallel.ranks:  # as started by another launcher
        parallel = config.train.parallel.model_copy(update={"ranks": ranks})
        config = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    layout = local_layout(config, ranks).layout
    devices = [] if config.train.parallel.device == "cpu" else machine.gpus()["devices"]
    sizes = [device["memory_bytes"] for device in devices if device["memory_bytes"]]
    if sizes:
        return _warning(config, layout, min(sizes), devices[0]["name"], "cuda")
    if config.train.parallel.device == "cuda":
        return None
    memory = machine.memory()
    whole = min(memory["total_bytes"], memory["cgroup_limit_bytes"] or memory["total_bytes"])
    nodes = config.train.nodes
    here = ranks if nodes is None else max(1, ranks // nodes.count)
    share = "this machine" if here == 1 else f"its share of this machine, one of {here},"
    return _warning(config, layout, tensor_bytes_on_cpu(whole, here), share, "cpu")


def _warning(config: "RunConfig", layout: "Layout", memory_bytes: float, name: str, device: str) -> str | None:
    from smalti.base.units import format_bytes
    from smalti.cost.memory.fit import largest_microbatch, memory_fixes
    from smalti.cost.memory.per_rank import memory_per_rank

    needed = memory_per_rank(config, layout=layout, device=device).total_bytes
    if needed <= memory_bytes:
        return None
    is_auto = config.train.microbatch_tokens == "auto"
    if is_auto and largest_microbatch(config, memory_bytes, layout, device=device) is not None:
        return None  # a smaller microbatch will be chosen
    fixes = memory_fixes(config, memory_bytes, layout, device=device)
    fix = f"would fit: {fixes[0].change}" if fixes else "neither a smaller microbatch nor recomputation would help"
    has = f"{name} has {format_bytes(memory_bytes)} for tensors"
    return f"memory: a rank needs {format_bytes(needed)} (smalti plan memory), {has}; {fix}"
