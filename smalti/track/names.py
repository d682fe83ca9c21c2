"""The table of all metrics, with unit and meaning. Composer's names are kept verbatim.

Composer says *batch* for a step and *sample* for a sequence; only these names do so. ``<...>`` is one part of a name: a
source, an area of the model, a number. A name that is not in the table raises SmaltiError.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

from smalti.base.errors import SmaltiError, UserError, nearest

_CHARSET = re.compile(r"[A-Za-z0-9_./-]+")
_PART = {"<i>": r"[0-9]+"}
_ANY_PART = r"[A-Za-z0-9_.-]+"

EVAL, EVAL_EMA = "metrics/eval/", "metrics/eval_ema/"
"""Beginning of the names of held-out measures: of the weights, and of their moving average."""

_FETCH = "rank 0, sum since the start of the attempt"


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    """The name, or a pattern with ``<parts>``."""
    unit: str
    """Unit; ``1`` for a ratio or fraction."""
    reduction: str
    """How the values of tokens, ranks or steps are combined."""
    meaning: str
    """One sentence."""


_SAMPLES = "mean of the samples since the line before"

_SYSTEM: tuple[Metric, ...] = (
    Metric("system/cpu_frac", "1", _SAMPLES, "Share of the machine's CPU time that was used."),
    Metric("system/load_1min", "processes", _SAMPLES, "Processes that run or wait for a core, over one minute."),
    Metric("system/memory_used_bytes", "bytes", _SAMPLES, "Memory of the machine that is not available."),
    Metric("system/memory_frac", "1", _SAMPLES, "The same as a share of all memory."),
    Metric("system/process_cpu_cores", "cores", _SAMPLES, "Cores that rank 0's process kept busy."),
    Metric("system/process_memory_bytes", "bytes", _SAMPLES, "Resident memory of rank 0's process."),
    Metric("system/disk_read_bytes_per_s", "bytes/s", _SAMPLES, "Read from all disks of the machine."),
    Metric("system/disk_write_bytes_per_s", "bytes/s", _SAMPLES, "Written to all disks of the machine."),
    Metric("system/disk_free_bytes", "bytes", _SAMPLES, "Free space on the disk of the run folder."),
    Metric("system/net_in_bytes_per_s", "bytes/s", _SAMPLES, "Received by all network interfaces but loopback."),
    Metric("system/net_out_bytes_per_s", "bytes/s", _SAMPLES, "Sent by all network interfaces but loopback."),
    Metric("system/gpu<i>/busy_frac", "1", _SAMPLES, "Share of the time in which a kernel ran on the GPU."),
    Metric("system/gpu<i>/memory_used_bytes", "bytes", _SAMPLES, "Memory of the GPU in use, by any process."),
    Metric("system/gpu<i>/memory_frac", "1", _SAMPLES, "The same as a share of the GPU's memory."),
    Metric("system/gpu<i>/power_watts", "W", _SAMPLES, "Power that the GPU draws."),
    Metric("system/gpu<i>/temperature_celsius", "degrees C", _SAMPLES, "Temperature of the GPU."),
    Metric("system/gpu<i>/sm_clock_mhz", "MHz", _SAMPLES, "Clock of the GPU's processors."),
    Metric("system/gpu<i>/memory_clock_mhz", "MHz", _SAMPLES, "Clock of the GPU's memory."),
)
"""The machine of rank 0 (``track/system.py``); a GPU has its NVML number. MLflow shows ``system/`` separately."""

TABLE: tuple[Metric, ...] = (
    Metric("loss/train/total", "nats/token", "mean over the tokens of the step", "What the optimizer minimises."),
    Metric("loss/train/cross_entropy", "nats/token", "mean over the tokens of the step", "Next-token loss."),
    Metric(
        "loss/train/z",
        "nats^2/token",
        "mean over tokens",
        "Squared log-partition of the output, times train.loss.z_loss_coef.",
    ),
    Metric(
        "loss/train/balance",
        "1",
        "mean over tokens and layers",
        "Load-balance loss of the experts, before model.moe.balance_loss_coef; 1 where all are used equally.",
    ),
    Metric(
        "loss/train/global_balance",
        "1",
        "mean over tokens and layers",
        "The same, relative to the load of the previous step's whole batch, before model.moe.global_balance_loss_coef.",
    ),
    Metric(
        "loss/train/router_z",
        "nats^2/token",
        "mean over tokens and layers",
        "Squared log-partition of the router, before model.moe.z_loss_coef.",
    ),
    Metric(
        "loss/train/targets",
        "tokens",
        "mean over pairs or answers",
        "Targets in the loss of a pair or answer; absent where the loss is a mean over targets.",
    ),
    Metric(
        "preference/accuracy",
        "1",
        "mean over pairs",
        "Share of pairs whose chosen answer has the higher reward; kto: of answers on the right side of its "
        "divergence. Ties (equal up to rounding, as all are before the first step) count one half.",
    ),
    Metric(
        "preference/reward_chosen",
        "1",
        "mean over pairs",
        "beta x log-ratio to the reference of chosen answers (ipo: per token); simpo: beta x mean log-probability.",
    ),
    Metric("preference/reward_rejected", "1", "mean over pairs", "The same of rejected answers."),
    Metric(
        "preference/reward_margin", "1", "mean over pairs", "preference/reward_chosen - preference/reward_rejected."
    ),
    Metric(
        "preference/logp_chosen",
        "nats",
        "mean over pairs",
        "Log-probability of chosen answers, which may fall while the margin grows.",
    ),
    Metric("preference/logp_rejected", "nats", "mean over pairs", "Log-probability of rejected answers."),
    Metric("preference/logp", "nats", "mean over answers", "Log-probability of answers (kto)."),
    Metric(
        "preference/kl_estimate",
        "nats",
        "mean over answers",
        "Log-ratio to the reference of mismatched answers: an estimate of the divergence, which may be negative by "
        "chance. kto's divergence in the next step is the estimate, at least 0.",
    ),
    Metric(
        "reward/accuracy",
        "1",
        "mean over pairs",
        "Share of pairs whose chosen answer has the higher score; ties count one half.",
    ),
    Metric("reward/chosen", "1", "mean over pairs", "Score of chosen answers."),
    Metric("reward/rejected", "1", "mean over pairs", "Score of rejected answers."),
    Metric("reward/margin", "1", "mean over pairs", "reward/chosen - reward/rejected."),
    Metric(
        "loss/train/divergence",
        "nats/token",
        "mean over targets",
        "Divergence from the teacher, times the squared temperature (distillation).",
    ),
    Metric(
        "metrics/train/LanguageCrossEntropy", "nats/token", "mean over tokens", "Next-token loss of the training batch."
    ),
    Metric("metrics/train/LanguagePerplexity", "1", "exp of the mean", "exp(LanguageCrossEntropy)."),
    Metric("metrics/eval/<source>/LanguageCrossEntropy", "nats/token", "mean over tokens", "Held-out cross-entropy."),
    Metric("metrics/eval/<source>/LanguagePerplexity", "1", "exp of the mean", "exp of the held-out cross-entropy."),
    Metric(
        "metrics/eval/<source>/bits_per_byte",
        "bits/byte",
        "nats per token / ln 2 x tokens per byte",
        "Held-out bits per byte, estimated in the loop: tokens per byte are those of all held-out text.",
    ),
    Metric(
        "metrics/eval/<source>/preference_<measure>",
        "as the measure",
        "mean over held-out pairs",
        "A measure of preference/ on held-out pairs, and preference_loss.",
    ),
    Metric(
        "metrics/eval/<source>/reward_<measure>",
        "as the measure",
        "mean over held-out pairs",
        "A measure of reward/ on held-out pairs, and reward_loss.",
    ),
    Metric(
        f"{EVAL_EMA}<source>/<measure>",
        "as the measure",
        "as the measure",
        "The same measure of metrics/eval/ with the moving average of the weights (train.ema), after the first step.",
    ),
    Metric(
        "icl/metrics/<suite>/<task>",
        "1",
        "mean over questions",
        "Accuracy of a task of evals. Of the Gauntlet (eval_gauntlet) also of a category and core_average: the mean of "
        "(accuracy - baseline) / (1 - baseline); the baseline is chance or, if higher, the most frequent label.",
    ),
    Metric("icl/metrics/<suite>/<task>/stderr", "1", "over questions", "Its standard error."),
    Metric("icl/metrics/<suite>/<task>/low", "1", "over questions", "Lower end of its 95 % interval."),
    Metric("icl/metrics/<suite>/<task>/high", "1", "over questions", "Upper end of its 95 % interval."),
    Metric(
        "icl/metrics/<suite>/<task>/gold_probability",
        "1",
        "mean over questions",
        "Probability of the right option, with those of a question scaled to sum to 1.",
    ),
    Metric(
        "icl/metrics/<suite>/<task>/bits_per_byte", "bits/byte", "over questions", "Bits per byte of the right answer."
    ),
    Metric(
        "icl/metrics/<suite>/<task>/n_missing",
        "benchmarks",
        "count",
        "Of an average of the Gauntlet: benchmarks that it lacks; above 0, the average is partial.",
    ),
    Metric(
        "icl/metrics/<suite>/<task>/truncated_frac",
        "1",
        "over questions",
        "Share of the generated answers that were cut at their longest length.",
    ),
    Metric("lr-<Optimizer>/group<i>", "1", "last", "Learning rate of a parameter group."),
    Metric("l2_norm/grad/global", "1", "over all parameters and ranks", "Gradient norm before clipping."),
    Metric("moe/load_imbalance", "1", "worst layer", "Tokens at the busiest expert / average."),
    Metric("moe/load_imbalance/layer<i>", "1", "a layer with experts, from 0", "The same of one layer."),
    Metric(
        "moe/load/layer<i>",
        "1",
        "a layer with experts, from 0",
        "List: tokens at each expert / average, at about 200 steps of a run; in metrics.jsonl, not for trackers.",
    ),
    Metric("moe/load_entropy", "1", "mean over layers, of log(experts)", "How evenly tokens spread over experts."),
    Metric(
        "moe/router_entropy",
        "1",
        "mean over tokens and layers, of log(experts)",
        "Uncertainty of the router about a token: 1 where all experts score equally, 0 where one has all weight.",
    ),
    Metric("moe/router_entropy/layer<i>", "1", "a layer with experts, from 0", "The same of one layer."),
    Metric("moe/dead_experts_frac", "1", "over all layers", "Share of the experts that received no token in the step."),
    Metric("moe/dead_experts_frac/layer<i>", "1", "a layer with experts, from 0", "The same of one layer."),
    Metric("time/batch", "steps", "last", "Optimizer steps completed."),
    Metric("time/sample", "sequences", "sum", "Sequences trained on."),
    Metric(
        "time/token", "tokens", "sum", "Tokens trained on: targets in the loss; of a run with tune, those of its rows."
    ),
    Metric("time/epoch", "1", "last", "Tokens used from the largest source / tokens that it has."),
    Metric("time/train", "hours", "sum over attempts", "Time in training steps, without evals and saves."),
    Metric("time/val", "hours", "sum over attempts", "Wall-clock time spent on evaluations in the loop."),
    Metric("time/total", "hours", "sum over attempts", "Training and evaluations together."),
    Metric(
        "time/remaining_estimate",
        "hours",
        "from the recent rate",
        "Estimated time to the end of the run, evaluations at their share so far.",
    ),
    Metric("time/step_s", "s", "recent steps", "Wall-clock time of a step, without evals and saves."),
    Metric("throughput/batches_per_sec", "steps/s", "recent steps", "Optimizer steps per second."),
    Metric("throughput/samples_per_sec", "sequences/s", "recent steps, all ranks", "Sequences per second."),
    Metric("throughput/tokens_per_sec", "tokens/s", "recent steps, all ranks", "Tokens per second."),
    Metric("throughput/flops_per_sec", "FLOP/s", "recent steps, all ranks", "Model FLOPs per second (cost/flops.py)."),
    Metric("throughput/device/batches_per_sec", "steps/s", "per rank", "Steps per second and rank."),
    Metric("throughput/device/samples_per_sec", "sequences/s", "per rank", "Sequences per second and rank."),
    Metric("throughput/device/tokens_per_sec", "tokens/s", "per rank", "Tokens per second and rank."),
    Metric("throughput/device/flops_per_sec", "FLOP/s", "per rank", "Model FLOPs per second and rank."),
    Metric("throughput/device/mfu", "1", "recent steps", "Model FLOPs / peak; absent where the peak is unknown."),
    Metric("memory/peak_allocated_mem", "GB", "rank 0", "Peak memory of tensors on the device in this attempt."),
    Metric("memory/peak_reserved_mem", "GB", "rank 0", "Peak device memory reserved from the driver."),
    Metric("memory/current_active_mem", "GB", "rank 0", "Device memory in use at this line."),
    Metric("data/wait_frac", "1", "recent steps", "Share of the time that a step waited for data."),
    Metric("data/mix/<source>/tokens", "tokens", "sum", "Tokens of a source trained on since the start of the run."),
    Metric("data/fetch/requests", "1", _FETCH, "Requests sent to stores, hedges included."),
    Metric("data/fetch/bytes", "bytes", _FETCH, "Bytes received from stores."),
    Metric("data/fetch/retries", "1", _FETCH, "Requests retried after a failure."),
    Metric("data/fetch/hedges", "1", _FETCH, "Second requests sent because the first was slow."),
    Metric("data/fetch/slowdowns", "1", _FETCH, "Responses that asked for fewer requests (503 SlowDown, 429)."),
    Metric("data/fetch/failovers", "1", _FETCH, "Ranges read from another copy than the first in the list."),
    Metric("data/fetch/cache_hits", "1", _FETCH, "Ranges that came from the node's cache."),
    Metric("data/fetch/rereads", "1", _FETCH, "Blocks that failed their checksum and were intact when read again."),
    Metric("data/fetch/wait_s", "s", _FETCH, "Time that readers waited for stores, summed over threads."),
    Metric("ckpt/save_s", "s", "last", "Time from the start of a checkpoint until it was complete."),
    Metric("ckpt/block_s", "s", "last", "Time that training has waited for a checkpoint."),
    Metric("ckpt/bytes", "bytes", "last", "Size of a checkpoint."),
    Metric("ckpt/peer_s", "s", "last", "Time from the start of a copy to shared memory until it was complete."),
    Metric("ckpt/peer_block_s", "s", "last", "Time that training has waited for a copy that is in shared memory only."),
    Metric("ckpt/staging_bytes", "bytes", "rank 0", "Host memory of the copy that a save is written from."),
    Metric(
        "evals/<suite>/<task>/<measure>",
        "as the measure",
        "over the task's samples",
        "A score of `smalti eval run`, at the step of the model; for trackers, not in metrics.jsonl.",
    ),
    *_SYSTEM,
)
"""All metrics, in the order of the reference page."""


def metric(name: str) -> Metric:
    """Return the row of ``name``. Raises SmaltiError for a name outside the table or the character set."""
    row = _find(name)
    if row is None:
        if not _CHARSET.fullmatch(name):
            raise SmaltiError(f"metric name '{name}' has characters outside A-Z a-z 0-9 _ . / -")
        close = nearest(name, [row.name for row in TABLE])
        raise SmaltiError(
            f"metric name '{name}' is not in smalti/track/names.py", hint=f"did you mean '{close}'?" if close else None
        )
    return row


def check(names: Iterable[str]) -> None:
    """Raise SmaltiError for the first name that is not in the table."""
    for name in names:
        metric(name)


def require_evaluated(name: str | None, heldout: Collection[str], *, has_ema: bool) -> None:
    """Raise UserError for a ``train.checkpoint.best`` that no evaluation measures on the sets of ``heldout``; not for
    None, nor for a set where nothing is held out, which is a warning (``train/best.py``).

    Not known before the first evaluation: whether its task, or the measure of its loss, is among the results.
    """
    if name is None:
        return
    row = _find(name.replace(EVAL_EMA, EVAL, 1))
    source = name.removeprefix(EVAL).removeprefix(EVAL_EMA).partition("/")[0]
    if row is not None and (
        row.name.startswith("icl/")
        or (row.name.startswith(EVAL) and (source in heldout or not heldout) and (has_ema or name.startswith(EVAL)))
    ):
        return
    allowed = [f"{prefix}{each}/LanguageCrossEntropy" for prefix in (EVAL, *[EVAL_EMA] * has_ema) for each in heldout]
    close = nearest(name, allowed)
    raise UserError(
        f"train.checkpoint.best={name} is not measured in this run",
        allowed=f"{', '.join(allowed) or f'{EVAL}NAME/LanguageCrossEntropy'}, or another measure of these sets",
        hint=f"train.checkpoint.best={close or allowed[0]}" if allowed else "data.heldout.NAME=FOLDER adds a set",
    )


@cache
def _find(name: str) -> Metric | None:
    if not _CHARSET.fullmatch(name):
        return None
    return next((row for row, pattern in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    rows = []
    for row in sorted(TABLE, key=lambda row: "<" in row.name):
        parts = re.split(r"(<[A-Za-z]+>)", row.name)
        text = "".join(_PART.get(p, _ANY_PART) if p.startswith("<") else re.escape(p) for p in parts)
        rows.append((row, re.compile(text)))
    return tuple(rows)
