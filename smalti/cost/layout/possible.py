"""Checks whether ``smalti train`` can apply a layout to a run, and finds the nearest that it can.

A layout that passes ``check`` passes the rules of every axis (``cost/layout/rules.py``), which ``smalti/distributed``
checks too; so does every layout that a hint names. Memory and speed are not considered, and the batch only for
pipelines: otherwise a rank short of rows runs an empty microbatch.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict

from smalti.base.errors import UserError
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import AXES, Layout, layout_of
from smalti.cost.layout.rules import (
    divisors,
    refuse,
    why_not_adapter,
    why_not_expert,
    why_not_few_rows,
    why_not_pipeline,
    why_not_sequence,
    why_not_slices,
    why_not_tensor,
)

_OPTIONS = {"pipeline": "pipeline_schedule", "expert": "dispatch", "sequence": "context"}
"""Axis -> the option that has an effect only with it."""


def possible_layout(config: JobConfig, ranks: int | None = None) -> Layout:
    """Return the layout of the config's axes over ``ranks`` (None: the config's); ``auto`` as in ``layout_of``.

    UserError with the nearest possible layout if it is not possible.
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
    """Raise UserError, with the nearest possible layout, if the model or its rows do not allow this one."""
    for axis, why in reasons(config, layout).items():
        sizes = {getattr(possible, axis) for possible in _layouts(config, layout.world_size)}
        refuse(layout, axis, why, sizes, _hint(config, layout.world_size))


def reasons(config: RunConfig, layout: Layout) -> dict[str, str]:
    """Return axis -> why its size is not possible; empty if the layout is possible."""
    model, parallel = config.model, config.train.parallel
    reason_of: dict[str, str | None] = {
        "tensor": why_not_tensor(model, layout.tensor) or why_not_adapter(config, "tensor", layout.tensor),
        "pipeline": why_not_pipeline(model, layout.pipeline, parallel.pipeline_schedule)
        or why_not_adapter(config, "pipeline", layout.pipeline)
        or why_not_few_rows(-(-_fewest_rows(config) // layout.data_ranks), layout.pipeline),
        "expert": why_not_expert(model, layout.expert, layout.weight_shards, layout.tensor)
        or why_not_adapter(config, "expert", layout.expert, layout.weight_shards),
    }
    for seq_len in sorted({seq_len for _, seq_len in config.batches_and_lengths} | set(config.data.seq_lens)):
        reason_of["sequence"] = reason_of.get("sequence") or why_not_sequence(
            model, seq_len, layout.sequence, tensor=layout.tensor, context=parallel.context
        )
        reason_of["tensor"] = reason_of["tensor"] or why_not_slices(seq_len // layout.sequence, layout.tensor)
    return {axis: why for axis, why in reason_of.items() if why is not None}


def nearest(config: RunConfig, ranks: int) -> Layout:
    """Return the possible layout of ``ranks`` ranks that is nearest to the config's axes.

    The fewest axes are changed, by the smallest factors. ``auto`` axes other than shard are 1, as in ``layout_of``.
    """
    return min(_layouts(config, ranks), key=lambda layout: _distance(config, layout))


def changes(config: RunConfig, layout: Layout) -> str:
    """Return the ``train.parallel.AXIS=SIZE ...`` that changes the config's axes to those of ``layout``; ``auto``
    stays.

    The option of an axis that becomes 1 is reset to its default, because it would be refused as without effect.
    """
    parallel, sizes = config.train.parallel, asdict(layout)
    values = {axis: getattr(parallel, axis) for axis in AXES}
    words = [f"{axis}={sizes[axis]}" for axis in AXES if values[axis] not in ("auto", sizes[axis])]
    for axis, option in _OPTIONS.items():
        default = type(parallel).model_fields[option].default
        if sizes[axis] == 1 and values[axis] != "auto" and getattr(parallel, option) != default:
            words.append(f"{option}={default}")
    return " ".join(f"train.parallel.{word}" for word in words)


def _fewest_rows(config: RunConfig) -> int:
    return min(batch // seq_len for batch, seq_len in config.batches_and_lengths)


def _hint(config: RunConfig, ranks: int) -> str:
    return changes(config, nearest(config, ranks))


def _distance(config: RunConfig, layout: Layout) -> tuple[int, float, int]:
    changed, factor = 0, 0.0
    for axis, size in asdict(layout).items():
        wanted = getattr(config.train.parallel, axis)
        if wanted not in ("auto", size):
            changed += 1
            factor += abs(math.log2(size / wanted))
    return changed, round(factor, 9), layout.replicate


def _layouts(config: RunConfig, ranks: int) -> Iterator[Layout]:
    """Yield all possible layouts of so many ranks; ``auto`` axes other than shard are 1."""
    parallel, model = config.train.parallel, config.model
    experts = divisors(model.moe.num_experts) if model.moe else [1]

    def sizes(axis: str, of: int) -> list[int]:
        return [1] if getattr(parallel, axis) == "auto" else divisors(of)

    for tensor in sizes("tensor", ranks):
        if why_not_tensor(model, tensor) or why_not_adapter(config, "tensor", tensor):
            continue
        for pipeline in sizes("pipeline", ranks // tensor):
            if why_not_pipeline(model, pipeline, parallel.pipeline_schedule):
                continue
            if why_not_adapter(config, "pipeline", pipeline):
                continue
            for sequence in sizes("sequence", ranks // (tensor * pipeline)):
                if reasons(config, Layout(sequence=sequence, tensor=tensor)):
                    continue
                data_ranks = ranks // (tensor * pipeline * sequence)
                if why_not_few_rows(-(-_fewest_rows(config) // data_ranks), pipeline):
                    continue
                for replicate in sizes("replicate", data_ranks):
                    shard = data_ranks // replicate
                    for expert in experts if parallel.expert != "auto" else [1]:
                        shards, overlaps = shard * sequence, sequence % expert and expert % sequence
                        why = why_not_expert(model, expert, shards, tensor)
                        if not overlaps and not why and not why_not_adapter(config, "expert", expert, shards):
                            yield Layout(replicate, shard, sequence, tensor, pipeline, expert)
