"""How long training takes: the example of 7B parameters on 64 GPUs, MFU, and DBRX's run."""

from functools import partial

from smalti.cost.flops import mfu
from smalti.plan.flops_conventions import convert_mfu, flops_per_token
from talks import arithmetic as plan
from talks.rows import Figure, Section

_N = 7e9
_D = plan.chinchilla_tokens(_N)
_TOKENS_PER_S = 234_614
"""Printed with 50.73% MFU: 7b, 2048 tokens, 64 A100-40GB; LLM Foundry, scripts/train/benchmarking/README.md."""
_ACTIVE, _TOKENS, _GPUS = 36e9, 12e12, 3072

# fmt: off
_slide = partial(Figure, "dbrx", "How long will it take to train my model?")
_DATA = "20 x 7e9 is 1.4e11. The next line's 5.88e21 needs 1.4e11 too; 1.8e11 would give 7.56e21"
_EXAMPLE = (
    *(
        _slide(f"7b-tokens-{line}", line, "Data = 20 x 7e9 = 1.8e11", "1.8e11", lambda: plan.chinchilla_tokens(_N),
               "20 x 7e9 tokens", "wrong", _DATA, "1.4e11")
        for line in (690, 801, 819)
    ),
    _slide("7b-flops", 692, "FLOPs = 6 x 7e9 x 1.8e11 = 5.88e21", "5.88e21", lambda: plan.train_flops(_N, _D),
           "6 x 7e9 x 1.4e11"),
    _slide("64-gpus", 694, "Cluster FLOP/sec = 3.12e14 x 64 = 2e16", "2e16", lambda: 64 * plan.peak("a100-40gb"),
           "64 x 312e12 FLOP/s"),
    _slide("7b-days-at-peak", 696, "5.88e21 / 2e16 = 3.4 days", "3.4 days",
           lambda: plan.days(_N, _D, 64, "a100-40gb"), "6ND / (64 A100s at their peak)"),
    _slide("64-h100s-at-peak", 696, "64 H100s ... 3.4 days", "3.4 days", lambda: plan.days(_N, _D, 64, "h100-sxm"),
           "6ND / (64 H100s at their peak)", "wrong",
           "the slide is headed 64 H100s and computes with the A100's 312 TFLOP/s; an H100 has 989.4", "1.07 days"),
    _slide("64-gpus-at-mfu", 823, "3.12e14 x 64 x 50.7% = 1.01e16", "1.01e16",
           lambda: 64 * plan.peak("a100-40gb") * 0.507, "64 x 312e12 x 0.507 FLOP/s"),
    _slide("7b-days", 825, "5.88e21 / 1.01e16 = 6.7 days", "6.7 days",
           lambda: plan.days(_N, _D, 64, "a100-40gb", 0.507), "6ND / (64 A100s at 50.7%)"),
    _slide("64-h100s", 825, "64 H100s ... 6.7 days", "6.7 days", lambda: plan.days(_N, _D, 64, "h100-sxm", 0.507),
           "6ND / (64 H100s at 50.7%)", "wrong", "A100s again; and an H100 rarely reaches the MFU of an A100",
           "2.12 days"),
    _slide("7b-measured-days", 825, "6.7 days", "6.7 days", lambda: _D / _TOKENS_PER_S / 86_400,
           "140B tokens / 234,614 tokens/s, the speed that LLM Foundry printed for this MFU", "theirs",
           "50.7% counts attention and 6.65B parameters, the 6.7 days neither: at that speed it takes longer",
           "6.91 days"),
)

_MPT = plan.model("mpt-7b")
_MFU = (
    _slide("mfu-with-attention", 782, "For this configuration, 50.7% MFU", "50.7%",
           lambda: mfu(_TOKENS_PER_S, flops_per_token(_MPT, 2048, "llm-foundry"), 64 * plan.peak("a100-40gb")),
           "234,614 tokens/s x FLOPs of MPT-7B by llm-foundry's formula / 64 A100s"),
    _slide("mfu-by-6nd", 780, "Only counts 6 x Parameters x Tokens", "50.7%",
           lambda: convert_mfu(0.507, _MPT, 2048, source="llm-foundry", target="6n"),
           "50.7% of llm-foundry's formula, by 6N", "wrong",
           "the 50.7% count attention as well; by 6ND alone the same run has 46.9%", "46.9%"),
    Figure("build", "How much does it cost to train?", "actual-flops", 54, "Actual FLOPs = FLOPs * MFU", "FLOPs * MFU",
           lambda: plan.peak("a100-40gb") * 0.507, "312e12 FLOP/s x 0.507", "wrong",
           "MFU does not lower the FLOPs of a run, it lowers the rate: actual FLOP/s = peak FLOP/s x MFU, here of an "
           "A100 at 50.7%", "1.58e14 FLOP/s"),
    Figure("build", "How much does it cost to train?", "attention-share", 67, "^ Ignores self-attention", "6 * N * D",
           lambda: flops_per_token(_MPT, 2048) / flops_per_token(_MPT, 2048, "6n") - 1,
           "12 x layers x width x 2048 / 6N of MPT-7B", "theirs", "what 6ND leaves out", "8.1%"),
)

_DBRX = (
    Figure("blog", "Introduction", "dbrx-flops", 7, "3072 NVIDIA H100s ... more than 12 trillion tokens", "12T",
           lambda: plan.train_flops(_ACTIVE, _TOKENS), "6 x 36e9 x 12e12", "theirs", "", "2.59e24 FLOPs"),
    Figure("blog", "Training performance optimizations", "dbrx-days-at-peak", 52, "across a 3-month duration",
           "3 months", lambda: plan.days(_ACTIVE, _TOKENS, _GPUS, "h100-sxm"),
           "2.59e24 / (3072 H100s at their peak)", "theirs", "", "9.87 days"),
    Figure("blog", "Training performance optimizations", "dbrx-mfu", 52, "across a 3-month duration", "3 months",
           lambda: plan.mfu(_ACTIVE, _TOKENS, _GPUS, "h100-sxm", 90), "9.87 days / 90 days", "theirs",
           "too low for a run that goes well: the three months hold experiments, failures and post-training too",
           "MFU 11.0%"),
    Figure("blog", "Training performance optimizations", "dbrx-days", 52, "across a 3-month duration", "3 months",
           lambda: plan.days(_ACTIVE, _TOKENS, _GPUS, "h100-sxm", 0.33), "at 33% MFU", "theirs", "", "29.9 days"),
    Figure("roundtable", "Abhi Venigalla, 00:09:23", "ten-times-farther", 51, "go ten x farther than we ever have",
           "ten x", lambda: plan.train_flops(_ACTIVE, _TOKENS) / plan.train_flops(30e9, 1e12),
           "6ND of DBRX / 6ND of MPT-30B", "about", "FLOPs beside those of MPT-30B", "14.4x"),
)
# fmt: on

SECTIONS = (
    Section(
        "How long it takes",
        "Tokens = 20 x parameters, FLOPs = 6 x parameters x tokens, days = FLOPs / (GPUs x peak FLOP/s x MFU). "
        "`smalti plan budget` solves them for whichever is missing ([budget](../concepts/plan/budget.md), "
        "[FLOPs](../concepts/plan/flops.md)).",
        alone=(*_EXAMPLE, *_MFU, *_DBRX),
    ),
)
