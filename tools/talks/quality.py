"""Gains from better data on the Gauntlet, and the table of scores: measurements, few of which arithmetic can check."""

from functools import partial

from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

# fmt: off
_TASKS = ("LAMBADA", "HellaSwag", "PIQA", "ARC-E", "ARC-C", "BoolQ", "COPA", "Winograd", "Winogrande", "TriviaQA",
          "Jeopardy", "MMLU")
_SCORES = (  # line, model, scores as printed, and their mean, which is not printed
    (270, "MPT-7B", "0.703 0.761 0.799 0.673 0.394 0.750 0.813 0.878 0.683 0.343 0.308 0.296", "0.617"),
    (271, "LLaMA-7B", "0.738 0.751 0.792 0.652 0.411 0.767 0.779 0.807 0.675 0.443 0.334 0.302", "0.621"),
    (272, "StableLM-7B (alpha)", "0.533 0.411 0.666 0.435 0.259 0.606 0.672 0.646 0.513 0.049 0.000 0.251", "0.420"),
    (273, "Pythia-7B", "0.667 0.636 0.761 0.581 0.325 0.634 0.769 0.786 0.607 0.198 0.022 0.265", "0.521"),
    (274, "Pythia-12B", "0.704 0.672 0.768 0.605 0.351 0.675 0.781 0.847 0.627 0.233 0.026 0.253", "0.545"),
    (275, "GPTJ-6B", "0.683 0.665 0.762 0.583 0.355 0.648 0.789 0.833 0.641 0.234 0.026 0.261", "0.540"),
    (276, "GPT-NeoX-20B", "0.719 0.712 0.780 0.644 0.392 0.691 0.781 0.861 0.665 0.347 0.146 0.269", "0.584"),
    (277, "Cerebras-7B", "0.636 0.582 0.744 0.564 0.311 0.625 0.734 0.779 0.603 0.141 0.012 0.259", "0.499"),
    (278, "Cerebras-13B", "0.635 0.588 0.740 0.571 0.321 0.611 0.719 0.760 0.602 0.146 0.013 0.258", "0.497"),
    (279, "OPT-7B", "0.677 0.676 0.773 0.579 0.329 0.665 0.719 0.840 0.656 0.227 0.020 0.251", "0.534"),
    (280, "OPT-13B", "0.692 0.701 0.774 0.586 0.345 0.657 0.805 0.851 0.670 0.282 0.126 0.257", "0.562"),
)
# fmt: on


def _mean(scores: str) -> float:
    values = [float(score) for score in scores.split()]
    return sum(values) / len(values)


def _score_row(line: int, model: str, scores: str, mean: str) -> tuple[Cell, ...]:
    name = "mean-of-" + model.split()[0].lower()
    cell = Figure(
        "mpt", "Eval", name, line, model, "-", partial(_mean, scores), "mean of the row", "theirs", right=mean
    )
    return model, *scores.split(), cell


# fmt: off
_better = partial(Figure, "dbrx", "The Value of Better Data")
_ALONE = (
    Figure("blog", "Experiment tracking", "sweeps", 101, "for every 1T tokens trained ... the full 12 trillion tokens",
           "1T", lambda: plan.per(12e12, 1e12), "12T / 1T", "theirs", "sweeps of the Gauntlet in a run", "12"),
    _better("better-data", 511, "30.9% ... 39.0% ... 8.1pp improvement", "8.1pp", lambda: 39.0 - 30.9, "39.0 - 30.9"),
    _better("half-the-data", 519, "a better model with half as much data", "half", lambda: plan.per(500e9, 1000e9),
            "500B / 1000B", "agrees", "for 1.2 points more: 32.1% against 30.9%", "0.5"),
)
# fmt: on

SECTIONS = (
    Section(
        "Quality",
        "Scores are measurements; they can be compared, not computed.",
        (
            Table(
                "The Value of Better Data (dbrx, lines 502-517)",
                ("arch.", "tokens", "dataset", "Gauntlet score"),
                (
                    ("MPT-7B", "1000B", "MPT (Apr 2023)", "30.9%"),
                    ("MPT-7B", "1000B", "DBRX (Jan 2024)", "39.0%"),
                    ("MPT-7B", "500B", "DBRX (Jan 2024)", "32.1%"),
                ),
            ),
            Table(
                "Eval (mpt, lines 269-280); the mean is ours",
                ("model", *_TASKS, "mean"),
                tuple(_score_row(*row) for row in _SCORES),
            ),
        ),
        _ALONE,
    ),
)
