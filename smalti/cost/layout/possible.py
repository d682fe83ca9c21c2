"""Which layouts ``smalti train`` can lay for a run, and the nearest of them to one that it cannot.

Promises: whatever passes ``check`` passes the rules of every axis (``cost/layout/rules.py``), which are those of
``smalti/distributed``; whatever a hint names passes ``check``. Nothing is said of memory or speed; of the batch only
what a
pipeline needs: elsewhere a rank that is short of rows runs an empty microbatch.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict

from smalti.base.errors import UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import AXES, Layout, layout_of
from smalti.cost.layout.rules import (
    against_expert,
    against_few_rows,
    against_pipeline,
    against_sequence,
    against_slices,
    against_tensor,
    divisors,
)

_OPTIONS = {"pipeline": "pipeline_schedule", "expert": "dispatch", "sequence": "context"}
"""Axis -> the option that has an effect with it alone."""


def possible_layout(config: JobConfig, ranks: int | None = None) -> Layout:
    """The layout of the config's axes over ``ranks``, absent the config's own; ``auto`` as ``layout_of`` takes it.

    UserError with the nearest layout that can be laid where this one cannot.
    """
    ranks = ranks or config.train.parallel.ranks
    if not isinstance(config, RunConfig):
        return layout_of(config, ranks)
    try:
        layout = layout_of(config, ranks)
    except UserError as error:
        raise UserError(error.message, allowed=error.allowed, hint=_hint(config, ranks) or error.hint) from error
    check(config, layout)
    return layout


def check(config: RunConfig, layout: Layout) -> None:
    """UserError with the nearest possible layout where the model or its rows do not allow this one."""
    found = reasons(config, layout)
    if not found:
        return
    axis, why = next(iter(found.items()))
    sizes = sorted({getattr(one, axis) for one in _layouts(config, layout.world_size)})
    raise UserError(
        f"train.parallel.{axis}={getattr(layout, axis)} cannot be: {why}",
        allowed=f"over {layout.world_size} ranks, {axis} {', '.join(map(str, sizes))}",
        hint=_hint(config, layout.world_size),
    )


def reasons(config: RunConfig, layout: Layout) -> dict[str, str]:
    """Axis -> why it cannot have the size that it has; empty where the layout can be laid."""
    model, parallel = config.model, config.train.parallel
    found: dict[str, str | None] = {
        "tensor": against_tensor(model, layout.tensor),
        "pipeline": against_pipeline(model, layout.pipeline, parallel.pipeline_schedule)
        or against_few_rows(-(-_fewest_rows(config) // layout.data_ranks), layout.pipeline),
        "expert": against_expert(model, layout.expert, layout.weight_shards, layout.tensor),
    }
    for seq_len in sorted({seq_len for _, seq_len in config.batches_and_lengths} | set(config.data.seq_lens)):
        found["sequence"] = found.get("sequence") or against_sequence(
            model, seq_len, layout.sequence, tensor=layout.tensor, context=parallel.context
        )
        found["tensor"] = found["tensor"] or against_slices(seq_len // layout.sequence, layout.tensor)
    return {axis: why for axis, why in found.items() if why is not None}


def nearest(config: RunConfig, ranks: int) -> Layout:
    """The layout of ``ranks`` ranks that can be laid and is nearest to the config's axes: the fewest axes changed,
    those by the smallest factors. Axes that are ``auto`` but for shard stay 1, as ``layout_of`` takes them."""
    return min(_layouts(config, ranks), key=lambda layout: _distance(config, layout))


def changes(config: RunConfig, layout: Layout) -> str:
    """``train.parallel.AXIS=SIZE ...`` that makes the config's axes those of ``layout``; what is ``auto`` stays.

    An option of an axis that is 1 then, which would be refused as without effect, goes back to its default.
    """
    parallel, sizes = config.train.parallel, asdict(layout)
    given = {axis: getattr(parallel, axis) for axis in AXES}
    words = [f"{axis}={sizes[axis]}" for axis in AXES if given[axis] not in ("auto", sizes[axis])]
    for axis, option in _OPTIONS.items():
        default = type(parallel).model_fields[option].default
        if sizes[axis] == 1 and given[axis] != "auto" and getattr(parallel, option) != default:
            words.append(f"{option}={default}")
    return " ".join(f"train.parallel.{word}" for word in words)


def _fewest_rows(config: RunConfig) -> int:
    return min(batch // seq_len for batch, seq_len in config.batches_and_lengths)


def _hint(config: RunConfig, ranks: int) -> str:
    return changes(config, nearest(config, ranks))


def _distance(config: RunConfig, layout: Layout) -> tuple[int, float, int]:
    changed, factor = 0, 0.0
    for axis, size in asdict(layout).items():
        given = getattr(config.train.parallel, axis)
        if given not in ("auto", size):
            changed += 1
            factor += abs(math.log2(size / given))
    return changed, round(factor, 9), layout.replicate


def _layouts(config: RunConfig, ranks: int) -> Iterator[Layout]:
    """All layouts of so many ranks that can be laid; the axes that are ``auto`` but for shard are 1."""
    parallel, model = config.train.parallel, config.model
    experts = divisors(model.moe.num_experts) if model.moe else [1]

    def sizes(axis: str, of: int) -> list[int]:
        return [1] if getattr(parallel, axis) == "auto" else divisors(of)

    for tensor in sizes("tensor", ranks):
        if against_tensor(model, tensor):
            continue
        for pipeline in sizes("pipeline", ranks // tensor):
            if against_pipeline(model, pipeline, parallel.pipeline_schedule):
                continue
            for sequence in sizes("sequence", ranks // (tensor * pipeline)):
                if reasons(config, Layout(sequence=sequence, tensor=tensor)):
                    continue
                data_ranks = ranks // (tensor * pipeline * sequence)
                if against_few_rows(-(-_fewest_rows(config) // data_ranks), pipeline):
                    continue
                for replicate in sizes("replicate", data_ranks):
                    shard = data_ranks // replicate
                    for expert in experts if parallel.expert != "auto" else [1]:
                        overlaps = sequence % expert and expert % sequence
                        if not overlaps and not against_expert(model, expert, shard * sequence, tensor):
                            yield Layout(replicate, shard, sequence, tensor, pipeline, expert)
