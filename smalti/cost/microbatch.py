"""Chooses the microbatch of a run for ``train.microbatch_tokens: auto``, and checks those of pipelines.

The trainer and its dry run both call ``choose``. Its part without a memory size, ``cost.batch.usual_microbatch``, is
the planner's assumption for an unknown device.
"""

import contextlib
from dataclasses import dataclass
from typing import Literal

from smalti.base.errors import UserError
from smalti.config.parallel import PipelineSchedule
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.batch import usual_microbatch
from smalti.cost.memory.fit import largest_microbatch


@dataclass(frozen=True)
class Chosen:
    """A microbatch and how it was chosen."""

    tokens: int
    """Tokens of a rank, in whole rows of the longest."""
    by: Literal["config", "rule", "planner", "oom"]
    """``rule``: the rank's share up to a limit; ``oom``: half of what ran out of memory before."""
    fits: bool = True
    """False if by the plan not even one row fits the memory."""


def choose(
    config: RunConfig,
    layout: Layout,
    device: str,
    memory_bytes: float | None,
    *,
    limit_tokens: int | None = None,
) -> Chosen:
    """Choose the microbatch of a rank.

    A number in the config is used as it is. ``auto`` is the largest that fits ``memory_bytes``, on a CPU at most
    ``cost.batch.MICROBATCH_LIMIT_TOKENS``; without ``memory_bytes`` it is ``usual_microbatch``. For a pipeline it is
    the largest up to that into which every batch can be split.

    Args:
        device: ``cpu`` or ``cuda``.
        memory_bytes: memory of a rank for tensors; None if unknown.
        limit_tokens: the limit set by earlier attempts that ran out of memory.
    """
    tokens = config.train.microbatch_tokens
    if isinstance(tokens, int):
        chosen = Chosen(tokens, "config")
    else:
        chosen = _auto(config, layout, device, memory_bytes)
        fewer = for_pipeline(config, layout, chosen.tokens)
        if fewer != chosen.tokens:
            chosen = Chosen(fewer, "rule", chosen.fits)
    if limit_tokens is not None and limit_tokens < chosen.tokens:
        return Chosen(for_pipeline(config, layout, limit_tokens), "oom", chosen.fits)
    return chosen


def _auto(config: RunConfig, layout: Layout, device: str, memory_bytes: float | None) -> Chosen:
    by_rule = usual_microbatch(config, layout.data_ranks)
    if memory_bytes is None:
        return Chosen(by_rule, "rule")
    largest = largest_microbatch(config, memory_bytes, layout, device=device)
    fitting = largest or max(config.data.seq_lens)
    if device == "cuda" or fitting < by_rule:
        return Chosen(fitting, "planner", fits=largest is not None)
    return Chosen(by_rule, "rule", fits=largest is not None)


# ---- pipelines ------------------------------------------------------------------------------------------------------


def for_pipeline(config: RunConfig, layout: Layout, tokens: int) -> int:
    """Return the largest microbatch up to ``tokens`` that a pipeline can run with every batch.

    Returns ``tokens`` if there is none, which ``check_pipeline`` refuses, or no pipeline.
    """
    if layout.pipeline == 1:
        return tokens
    longest = max(config.data.seq_lens)
    share = min(-(-batch // seq_len // layout.data_ranks) for batch, seq_len in config.batches_and_lengths)
    for rows in range(min(tokens // longest, max(1, share // layout.pipeline)), 0, -1):
        with contextlib.suppress(UserError):
            check_pipeline(config, layout, rows * longest)
            return rows * longest
    return tokens


def check_pipeline(config: RunConfig, layout: Layout, microbatch_tokens: int) -> None:
    """Raise UserError, with the nearest possible microbatch, if a pipeline cannot run the steps of this run."""
    if layout.pipeline == 1:
        return
    parallel = config.train.parallel
    if parallel.pipeline_schedule == "zero_bubble" and parallel.activation_checkpointing == "full":
        raise UserError(
            "train.parallel.pipeline_schedule=zero_bubble splits the backward pass in two, and each half would "
            "recompute the blocks (activation_checkpointing=full)",
            allowed="1f1b, interleaved, or activation_checkpointing=none",
            hint="train.parallel.pipeline_schedule=interleaved",
        )
    for batch, seq_len in config.batches_and_lengths:
        rows = -(-(batch // seq_len) // layout.data_ranks)
        microbatches = -(-rows // max(1, microbatch_tokens // seq_len))
        reason = why_not_microbatches(microbatches, layout.pipeline, parallel.pipeline_schedule)
        if reason is None:
            continue
        problem = (
            f"train.parallel.pipeline={layout.pipeline}: the {rows} rows of {seq_len} tokens that a rank has in a step "
            f"{reason}"
        )
        cuts = {-(-rows // each): each for each in range(rows, 0, -1)}
        possible = [n for n in cuts if why_not_microbatches(n, layout.pipeline, parallel.pipeline_schedule) is None]
        if not possible:
            raise UserError(problem, hint=f"train.parallel.pipeline={max(1, rows)}, or larger batches")
        nearest = min(possible, key=lambda n: abs(n - microbatches))
        raise UserError(problem, hint=f"train.microbatch_tokens={cuts[nearest] * seq_len}")


def why_not_microbatches(microbatches: int, pipeline: int, schedule: PipelineSchedule) -> str | None:
    """Return why a pipeline of so many ranks cannot run so many microbatches in a step, or None."""
    if microbatches < pipeline:
        return f"make {microbatches} microbatch{'es' * (microbatches > 1)}: fewer than ranks, of which some would idle"
    if schedule == "interleaved" and microbatches % (rounds := microbatches // pipeline):
        return f"make {microbatches} microbatches, not {rounds} equal rounds, as pipeline_schedule=interleaved needs"
    return None
