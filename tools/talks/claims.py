"""docs/audit/claims.md: claims of speed in the talks, and the evidence for them here.

Every measured number is read from bench/results and every predicted one computed by the planner when the page is
written; a claim without either is called unproven, with what would prove it.
"""

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from smalti.config.hardware import hardware
from smalti.cost.failures import mtbf_s, optimal_s
from smalti.plan.failures.goodput import Recovery, Timing, goodput_frac
from smalti.plan.failures.rates import failure_rate
from talks import arithmetic as plan
from talks import predictions

_DBRX = failure_rate("dbrx").per_1000_gpu_days

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"

Status = Literal["proven here", "predicted", "unproven"]
"""``proven here``: measured by the command, on the machine and date that the result file names, at that machine's size.
``predicted``: by the planner's arithmetic. ``unproven``: neither."""


@dataclass(frozen=True)
class Claim:
    """A claim of speed in a talk, and the evidence for it."""

    talk: str
    line: int
    quote: str
    status: Status
    evidence: Callable[[], str]
    """Numbers, or what would prove it."""
    command: str = ""
    result: str = ""
    """File of bench/results whose date and machine are printed."""


def result(name: str) -> dict[str, Any]:
    """Return the content of bench/results/NAME.json."""
    value: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return value


def recorded(name: str) -> dict[str, Any] | None:
    """Return the figures of bench/results/NAME.json, or None if there is no such file."""
    return figures(name) if (RESULTS / f"{name}.json").exists() else None


def figures(name: str) -> dict[str, Any]:
    """Return the figures of bench/results/NAME.json."""
    value: dict[str, Any] = result(name)["figures"]
    return value


def _start() -> str:
    start = figures("stream_start")
    reads = figures("fetch_start")
    return (
        f"{start['smalti']['first_s']:.2g} s from the start of the process to the first microbatch, two thirds through "
        f"{start['tokens'] / 1e12:.0f} trillion tokens, on one rank; a start of {reads['ranks']:,} ranks reads "
        f"{reads['metadata_gets']} index and lists {reads['lists']} times. Not measured: a start on many real nodes"
    )


def _resume() -> str:
    table = figures("stream")["table"]
    constructor, whole = (table[f"resume at 90 %, from {start}"] for start in ("the constructor", "process start"))
    return (
        f"{constructor['smalti']['median'] * 1e3:.2g} ms to the next batch at 90% of an epoch, "
        f"{whole['smalti']['median']:.2g} s with the imports; "
        f"{whole['mosaic']['ours_better']['ratio']:.2g} times as fast as mosaicml-streaming"
    )


def _exactly() -> str:
    elastic, kill, curve = figures("stream_elastic"), figures("stream_kill"), figures("same_curve")
    return (
        f"{elastic['cases']} cases with {elastic['kills']} kills and other numbers of ranks: {elastic['different']} "
        f"different orders; {2 * kill['kills_of_each']} kill -9 and {kill['starts_of_both']} starts: {kill['failed']} "
        f"failed (`make prove NAME=kill`); one loss curve through {len(curve['kills']) - 1} kills and on 1 to 8 "
        f"ranks: at most {max(curve['largest_difference'].values()):.1e} apart (`make bench NAME=same_curve`)"
    )


def _microbatches() -> str:
    curve = figures("same_curve")
    apart = curve["largest_difference"]
    return (
        f"{curve['steps']} steps with the same seed on 1, 2, 3, 4, 6 and 8 ranks: the largest difference of the "
        f"training loss from that of one rank is {max(apart.values()):.1e}"
    )


def _overhead() -> str:
    streamed = figures("stream")["table"]["tokens/s, int64 inputs and targets"]["smalti"]["median"]
    step = max(row["tokens_per_s"] for row in figures("train_cpu")["demo bf16"]["contenders"].values())
    return (
        f"the stream supplies {streamed / 1e6:.0f}M tokens/s in one process; the fastest step measured here consumes "
        f"{step / 1e3:.3g}k (`make bench NAME=train_cpu`), so reading takes 1/{streamed / step:,.0f} of its time even "
        "without prefetching. From local disk, in the page cache"
    )


def _one_reader() -> str:
    starts = figures("fetch_start")
    return (
        f"{starts['ranks']:,} ranks that start: {starts['metadata_gets']} read of metadata ({starts['index_bytes']} "
        f"bytes), {starts['lists']} listings, {starts['reads']:,} reads of data; with a local test server, eight "
        "ranks at a time"
    )


def _throttled() -> str:
    outage = figures("fetch_slow_down")
    return (
        f"a store that answers 503 to everything for {outage['outage_s']} s: {outage['requests_during']:,} requests in "
        f"that time at {outage['requests_per_s']}/s allowed, all {outage['steps']} steps made, longest wait "
        f"{outage['longest_wait_s']:.0f} s; the store is a local test server"
    )


def _restart() -> str:
    kinds = figures("recovery")
    ours = [row for name, row in kinds.items() if name.endswith("/smalti")]
    trials, named = sum(row["trials"] for row in ours), sum(round(row["trials"] * row["recall"]) for row in ours)
    died, hung = (
        max(kinds[f"{kind}/smalti"]["again_p95_s"] for kind in of)
        for of in (("sigkill", "exception"), ("sigstop", "held_gil", "deadlock", "stuck_data"))
    )
    stall_s, mtbf = 1.0, mtbf_s(_DBRX, 3072)
    timing = Timing(mtbf, stall_s, optimal_s(stall_s, mtbf), (Recovery(detect_s=30, restart_s=120),))
    return (
        f"{trials} faults in runs of two ranks: the right rank is named {named} times, and trains again after "
        f"{died:.0f} s (p95) if it died, {hung:.0f} s if it hung. On a cluster, which is not measured, restarts take "
        f"longer: with 30 s, 2 minutes and checkpoints that stall 1 s the goodput of 3,072 GPUs, which fail every "
        f"{mtbf / 3600:.2g} hours, is {goodput_frac(timing):.1%}"
    )


def _fp8() -> str:
    peaks = hardware("h100-sxm").peak_flops_per_s
    ratio = peaks["fp8"] / peaks["bf16"]
    share = (1 - 1 / 1.5) / (1 - 1 / ratio)
    return (
        f"FP8 training is not implemented. The peaks differ by {ratio:.2g}; 1.5 follows if {share:.0%} of the time of "
        "a BF16 step is matmuls that run at twice the rate. Would prove it: the same step in both formats on an H100"
    )


def _save() -> str:
    nbytes, measured = plan.weights_bytes("dbrx-132b", 96), figures("checkpoint")
    blocked, loads = measured["blocked"], measured["recovery"]
    return (
        f"a save of {measured['gigabytes']:g} GB on two ranks blocks training for "
        f"{blocked['dcp.save']['fast_s']:.3f} s (dcp.save {blocked['dcp.save']['slow_s']:.1f} s, dcp.async_save "
        f"{blocked['dcp.async_save']['slow_s']:.3f} s); a verified load takes {loads['slow_s']:.1f} s from the disk, "
        f"{loads['fast_s']:.1f} s from memory. DBRX's weights and two moments in fp32 are {nbytes / 1e12:.3g} TB: in "
        f"30 s {nbytes / 30e9 / 384:.2g} GB/s for each of 384 nodes, which is not measured"
    )


def _experts() -> str:
    proof = "Would prove it: DBRX Small and Llama2-13B, or a ladder of both kinds, on one data set"
    study = recorded("experts")
    if study is None:
        return f"the comparison at equal FLOPs (`make bench NAME=experts`) is not recorded. {proof}"
    dense, *others = study["arms"].items()
    apart = ", ".join(
        f"{name} {-row['less_than_dense']:+.3f} ± {row['less_than_dense_half']:.3f}" for name, row in others
    )
    shortest = min(study["lengths"], key=int)
    better, at_first = (
        f"{sum(row['less_than_dense'] > row['less_than_dense_half'] for row in rows.values())} of {len(rows) - 1} gain"
        for rows in (study["arms"], study["lengths"][shortest])
    )
    return (
        f"held-out bits per byte relative to a dense model of {dense[1]['params_active'] / 1e6:.2g}M parameters at the "
        f"same FLOPs (less is better; {dense[1]['tokens'] / 1e6:.3g}M tokens, {dense[1]['seeds']} seeds, 95 %): "
        f"{apart}. "
        f"{better}; at {int(shortest) / 1e6:.3g}M tokens {at_first} "
        f"([the study](../concepts/model/experts-study.md), `make bench NAME=experts`, {_measured('experts')}). {proof}"
    )


def _experts_beside_dense() -> str:
    """Return the prediction, and how far predicted steps with experts were from measured ones on a GPU."""
    text = predictions.experts_beside_dense()
    rows = recorded("train_gpu") or {}
    steps = {name: row for name, row in rows.items() if name.startswith(("moe", "dbrx")) and "planned_step_s" in row}
    if not steps:
        return f"{text}. No recorded step of an MoE model on a GPU was compared with its prediction"
    ratios = ", ".join(f"{row['planned_step_s'] / row['step_s']:.2f} for {name}" for name, row in steps.items())
    where = _measured("train_gpu")
    return f"{text}. Of recorded steps of MoE models on one GPU, planned over measured time is {ratios} ({where})"


def _data_processing() -> str:
    return (
        "the earlier pipeline and the data are not public. Would prove it: both on the same documents. Our "
        "deduplication is compared with others' in [the benchmarks of the data tools](../concepts/data/benchmarks.md)"
    )


def _attention() -> str:
    return (
        "on a CPU this gains nothing ([attention](../concepts/model/attention.md)). Would prove it: memory "
        "and time of a step on a GPU with each kernel, compared with plain attention"
    )


def _semdedup() -> str:
    return (
        "not measured. Would prove it: `smalti data compare` of two sets, with half of the data removed by `semantic` "
        "and at random"
    )


CLAIMS: tuple[Claim, ...] = (
    Claim("blog", 40, "less than 1 minute of startup overhead", "proven here", _start,
          "make bench NAME=stream_start", "stream_start"),
    Claim("blog", 40, "resume exactly where it left off instantaneously", "proven here", _resume,
          "make bench NAME=stream", "stream"),
    Claim("blog", 40, "deterministic shuffling ... deterministically resume exactly", "proven here", _exactly,
          "make prove NAME=elastic", "stream_elastic"),
    Claim("blog", 40, "and no training overhead", "proven here", _overhead, "make bench NAME=stream", "stream"),
    Claim("mpt", 92, "a deterministic dataloader (left) and microbatching engine", "proven here", _microbatches,
          "make bench NAME=same_curve", "same_curve"),
    Claim("roundtable", 132, "every gpu should go download the metadata file ... one guy", "proven here", _one_reader,
          "make prove NAME=fetch", "fetch_start"),
    Claim("roundtable", 123, "not get throttled or have other issues with object store", "proven here", _throttled,
          "make prove NAME=fetch", "fetch_slow_down"),
    Claim("blog", 45, "minimize blocking time to under 30 seconds during save and load", "proven here", _save,
          "make bench NAME=checkpoint", "checkpoint"),
    Claim("dbrx", 1028, "Automatic failure detection and blazingly fast job restart times", "proven here", _restart,
          "make bench NAME=recovery", "recovery"),
    Claim("blog", 24, "a misconfigured network driver, can lead to a 5x slow down", "predicted",
          predictions.slow_network, f"smalti plan scaling {predictions.MPT} --gpu a100-40gb --gpus 8,128"),
    Claim("mpt", 84, "near-linear scaling with more GPUs", "predicted", predictions.near_linear,
          f"smalti plan scaling {predictions.MPT} --gpu a100-40gb --gpus 8,128"),
    Claim("blog", 55, "reduce the memory footprint by nearly 3x for large models like DBRX", "predicted",
          predictions.memory_saved, f"smalti plan memory {predictions.ROWS} train.global_batch_tokens=50331648 "
          "train.parallel.activation_checkpointing=full --gpu h100-sxm"),
    Claim("blog", 58, "advanced MoE architectures at nearly the same speed as standard transformers", "predicted",
          _experts_beside_dense, f"smalti plan scaling {predictions.DBRX} --gpus 3072"),
    Claim("dbrx", 629, "Quality of a bigger model, speed of a smaller one", "predicted",
          predictions.speed_of_a_smaller_one, "smalti plan serving dbrx-132b --batch 8 --gpu h100-sxm"),
    Claim("roundtable", 92, "very, very close performance to ... 3d parallel strategies", "predicted",
          predictions.fsdp_beside_all, f"smalti plan layout {predictions.MPT_30B} --gpu h100-sxm --gpus 512"),
    Claim("blog", 35, "slows down as the number of machines increases, so we use ... (HSDP)", "predicted",
          predictions.replicas, f"smalti plan layout {predictions.MPT_30B} --gpu h100-sxm --gpus 512"),
    Claim("dbrx", 617, "FP8 training on H100 is 1.5x faster than BF16", "unproven", _fp8),
    Claim("dbrx", 667, "used 1.7x less training compute, and behaves like a model 2x smaller", "unproven", _experts),
    Claim("roundtable", 109, "our data processing literally got 100 x faster", "unproven", _data_processing),
    Claim("mpt", 210, "FlashAttention to reduce memory consumption and increase training throughput", "unproven",
          _attention),
    Claim("build", 234, "effectively halving training time", "unproven", _semdedup),
)  # fmt: skip

_INTRO = """<!-- Written by `make docs` from tools/talks/claims.py and bench/results; edit there. -->

# Claims of speed

The claims of speed in the [talks](talks.md), the best proven first. **Proven here** means measured by the
command, on the machine that the result file names: two CPU cores, no GPU, no cluster. This proves the mechanism at that
size. **Predicted** means by the planner's arithmetic, whose error is on the planner's pages. **Unproven** means
neither; the row says what would prove it. A line is that of the talk's text.

"""


@cache
def page() -> str:
    """Return the whole page."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    yield textwrap.dedent(_INTRO)
    yield "| claim | where | status | evidence |\n|---|---|---|---|\n"
    for claim in CLAIMS:
        evidence = claim.evidence() + "."
        if claim.command:
            evidence += f" `{claim.command}`"
        if claim.result:
            evidence += f", {_measured(claim.result)}"
        yield f'| "{claim.quote}" | {claim.talk}, {claim.line} | **{claim.status}** | {evidence} |\n'


def _measured(name: str) -> str:
    """Return date, machine and file of a result."""
    measured = result(name)
    machine = measured["machine"]
    device = machine["gpu"] or f"{machine['cores']} cores of an {machine['processor']}"
    if "machines" in measured["figures"]:  # the runs were elsewhere
        device = ", ".join(measured["figures"]["machines"])
    return f"{measured['date'][:10]}, {device} (bench/results/{name}.json)"
