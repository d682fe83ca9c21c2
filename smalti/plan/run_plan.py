"""Plan a run from its config: parameters, tokens, FLOPs, step time, total time.

The time is the predicted time of a step on a device (``cost/step_time/step.py``; for ranks on one CPU
``cost/layout/single_machine.py`` adds communication) times the number of steps, or FLOPs over a given rate. Reading
data, evals in the loop and checkpoints are not included.
"""

from dataclasses import asdict, dataclass
from typing import Any

from smalti.base.errors import UserError
from smalti.config.durations import RunLength
from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost.flops import FORMULA, mfu, train_flops_per_token, train_flops_per_token_causal
from smalti.cost.layout.single_machine import single_machine_step_time
from smalti.cost.params import Params, count
from smalti.cost.step_time.step import StepTime, peak_of_ranks

MAX_FLOPS_PER_S = 1e24
"""A hundred million GPUs of 1e16; more is taken for a typing error."""

CHINCHILLA_TOKENS_PER_PARAM = 20
"""Compute-optimal tokens for each parameter of a dense model (Hoffmann et al. 2022, arXiv 2203.15556)."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of one run. Times are None if no rate is known."""

    params: Params
    """Parameter counts."""
    tokens: int
    """Tokens of the whole run."""
    steps: int
    """Optimizer steps."""
    global_batch_tokens: float
    """Tokens of one step; the mean where it changes."""
    flops_per_token: float
    """FLOPs of forward and backward under ``FORMULA``; the mean over sequence lengths."""
    flops_per_token_causal: float
    """The same with attention halved for the causal mask, for comparison only."""
    total_flops: float
    """FLOPs of the whole run, under ``FORMULA``."""
    step_s: float | None
    """Predicted time of one step; the mean where steps differ."""
    step_s_low: float | None
    """Lower end of its interval; None where a rate was given."""
    step_s_high: float | None
    """Upper end of that interval."""
    total_s: float | None
    """Predicted time of all steps."""
    tokens_per_s: float | None
    """Predicted throughput of all ranks together."""
    peak_flops_per_s: float | None
    """Peak of all ranks in the compute format, on which MFU is based; None where unknown."""
    mfu_frac: float | None
    """Predicted MFU under ``FORMULA``."""
    step: StepTime | None
    """Parts of the last kind of step; None without a device."""

    @property
    def tokens_per_param(self) -> float:
        """Tokens per parameter, all counted."""
        return self.tokens / self.params.total

    @property
    def tokens_per_active_param(self) -> float:
        """Tokens per active parameter, comparable with Chinchilla's 20."""
        return self.tokens / self.params.active

    def to_json(self) -> dict[str, Any]:
        """Return a flat JSON object with units in the names."""
        rest = asdict(self)
        params = rest.pop("params")
        del rest["step"]
        return {
            **{f"params_{name}": value for name, value in params.items()},
            **rest,
            "flops_formula": FORMULA,
            "tokens_per_param": self.tokens_per_param,
            "tokens_per_active_param": self.tokens_per_active_param,
        }


def plan_run(config: RunConfig, *, machine: Hardware | None = None, rate_flops_per_s: float | None = None) -> RunPlan:
    """Plan ``config``.

    ``machine``: a rank's device. ``rate_flops_per_s``: FLOP/s that training reaches on all ranks together, instead of a
    device. With neither, the times are None. Raises UserError for a rate out of range.
    """
    if rate_flops_per_s is not None and not 0 < rate_flops_per_s <= MAX_FLOPS_PER_S:
        raise UserError(
            f"a rate of {rate_flops_per_s:g} FLOP/s is out of range",
            allowed=f"a number above 0, up to {MAX_FLOPS_PER_S:g}",
        )
    if rate_flops_per_s is not None and machine is not None:
        raise UserError("a device and a rate exclude each other", allowed="one of them")
    model, by_seq_len = config.model, config.tokens_by_seq_len()
    steps, tokens = config.length.total_steps, config.length.total_tokens
    flops = sum(train_flops_per_token(model, seq_len) * n for seq_len, n in by_seq_len.items())
    causal = sum(train_flops_per_token_causal(model, seq_len) * n for seq_len, n in by_seq_len.items())
    times: list[tuple[int, StepTime]] = []
    if machine is not None:
        for (batch, seq_len), number in steps_by_kind(config).items():
            times.append((number, single_machine_step_time(config, machine, batch_tokens=batch, seq_len=seq_len)))
    total_s = sum(number * each.total_s for number, each in times) if times else None
    if rate_flops_per_s is not None:
        total_s = flops / rate_flops_per_s
    peak = peak_of_ranks(config, machine) if machine else None
    tokens_per_s = None if total_s is None else tokens / total_s
    return RunPlan(
        params=count(model),
        tokens=tokens,
        steps=steps,
        global_batch_tokens=_mean(tokens, steps),
        flops_per_token=_mean(flops, tokens),
        flops_per_token_causal=_mean(causal, tokens),
        total_flops=float(flops),
        step_s=None if total_s is None else total_s / steps,
        step_s_low=sum(number * each.interval_s[0] for number, each in times) / steps if times else None,
        step_s_high=sum(number * each.interval_s[1] for number, each in times) / steps if times else None,
        total_s=total_s,
        tokens_per_s=tokens_per_s,
        peak_flops_per_s=peak,
        mfu_frac=mfu(tokens_per_s, flops / tokens, peak) if tokens_per_s and peak else None,
        step=times[-1][1] if times else None,
    )


def steps_by_kind(config: RunConfig) -> dict[tuple[int, int], int]:
    """Return (tokens of a step, seq_len) -> number of such steps, in the order of their first step."""
    length, lengths = config.length, config.seq_len_parts
    counts: dict[tuple[int, int], int] = {}
    starts = sorted({start for start, _ in (*length.batches, *lengths) if start < length.total_steps})
    for start, end in zip(starts, [*starts[1:], length.total_steps], strict=True):
        kind = length.batch_tokens(start), [seq_len for first, seq_len in lengths if first <= start][-1]
        counts[kind] = counts.get(kind, 0) + end - start
    return counts


def length_text(length: RunLength) -> str:
    """Return ``600 steps x 8192 tokens``, or with a ramp ``100 steps x 4096 + 500 steps x 8192 tokens``."""
    parts = [(start, size) for start, size in length.batches if start < length.total_steps]
    ends = [*(start for start, _ in parts[1:]), length.total_steps]
    return " + ".join(f"{end - start} steps x {n}" for (start, n), end in zip(parts, ends, strict=True)) + " tokens"


def _mean(total: int, n: int) -> float:
    return total // n if total % n == 0 else total / n
