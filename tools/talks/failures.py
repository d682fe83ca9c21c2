"""How often hardware fails."""

from functools import partial

from smalti.plan.failures.rates import failure_rate
from talks import arithmetic as plan
from talks.rows import Figure, Section

_GPUS, _PER_NODE = 3072, 8
_DBRX = failure_rate("dbrx").per_1000_gpu_days
_WEEKLY = failure_rate("mosaicml").per_1000_gpu_days
"""One node of 16 a week."""

# fmt: off
_ajay = partial(Figure, "roundtable", "Ajay Saini, 00:20:36")
_ALONE = (
    Figure("dbrx", "Problem: Hardware Failures", "failures-of-dbrx", 998, "Roughly once every 1000 H100-days", "1",
           lambda: plan.failures_per_day(_GPUS, _DBRX), "3072 GPUs / 1000", "theirs", "one every 7.8 hours",
           "3.07 a day"),
    _ajay("three-a-day", 80, "on a 3000 GPU cluster ... three per day", "three a day",
          lambda: plan.failures_per_day(3000, _DBRX), "3000 GPUs / 1000", right="3.0 a day"),
    _ajay("three-to-four", 80, "we actually did see three to four per day", "three to four",
          lambda: plan.per(3.5, _GPUS) * 1000, "3.5 / 3072 GPUs", "theirs", "failures in 1,000 GPU-days; 0.98 to 1.30",
          "1.14"),
    Figure("build", "Hardware Failures", "node-a-week", 299, "1 node out of 16 every week, approximately", "1 of 16",
           lambda: _WEEKLY, "1 / (16 x 8 x 7 GPU-days), 8 GPUs a node", "theirs",
           "failures in 1,000 GPU-days: the two talks agree", "1.12"),
    Figure("build", "Hardware Failures", "node-a-week-for-dbrx", 299, "1 node out of 16 every week", "1 of 16",
           lambda: plan.failures_per_day(_GPUS, _WEEKLY), "the same for 3072 GPUs", "theirs",
           "the three to four that were seen", "3.43 a day"),
    _ajay("failures-in-three-months", 80, "throughout the entire training run", "three to four",
          lambda: 90 * plan.failures_per_day(_GPUS, _DBRX), "90 days x 3.07", "theirs", "in three months", "276"),
    Figure("blog", "GPU fault tolerance", "nodes", 62, "thousands of GPUs across hundreds of nodes",
           "hundreds of nodes", lambda: _GPUS / _PER_NODE, "3072 / 8", "theirs", "", "384"),
    _ajay("pairs", 80, "check every single pair of machines", "every single pair",
          lambda: (_GPUS / _PER_NODE) * (_GPUS / _PER_NODE - 1) / 2, "384 x 383 / 2", "theirs",
          "383 rounds in which all nodes are tested at once", "73,536 pairs"),
    Figure("roundtable", "Bandish Shah, 00:11:54", "hundreds-of-thousands", 60,
           "split this workload across hundreds of thousands of GPU's", "hundreds of thousands",
           lambda: float(_GPUS), "over 3000, a sentence later", "wrong",
           "the transcript means hundreds or thousands", "3072"),
)
# fmt: on

SECTIONS = (
    Section(
        "Failures",
        "Failures a day = GPUs x rate. What they cost, and how often to save, says `smalti plan failures` "
        "([reliability](../concepts/plan/reliability.md)).",
        alone=_ALONE,
    ),
)
