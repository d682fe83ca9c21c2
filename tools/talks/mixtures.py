"""Data mixtures: the exercise of a trillion tokens, MPT-7B, MPT-30B, LLaMA, and the Pile's size."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

# fmt: off
_POOL = (  # line, source, tokens; epochs when a trillion is taken evenly
    (462, "Web data", "2.4T", "0.07"), (463, "Code data", "400B", "0.42"), (464, "Wikipedia English", "7B", "23.8"),
    (465, "Wikipedia Other", "47B", "3.5"), (466, "Science papers", "60B", "2.8"), (467, "Literature", "5B", "33.3"),
)
_MPT_7B = (  # line, source, billions in it, share, billions taken, epochs
    (192, "mC4 3.1.0 - English (200+ words)", "2417.99", "33%", "330", "0.14"),
    (193, "C4 - English - SemDedup 80%", "100.42", "29.9%", "299", "2.98"),
    (194, "RedPajama - CommonCrawl", "878.45", "10%", "100", "0.11"),
    (195, "The Stack - Selected Languages", "463.78", "10%", "100", "0.22"),
    (196, "RedPajama - Wikipedia", "4.87", "4%", "40", "8.21"),
    (197, "The Stack - Markdown", "107.07", "3.5%", "35", "0.33"),
    (198, "Semantic Scholar ORC", "48.95", "3.3%", "33", "0.68"),
    (199, "RedPajama - Books", "26.02", "3%", "30", "1.15"),
    (200, "RedPajama - arXiv", "28.10", "1.9%", "19", "0.68"),
    (201, "RedPajama - StackExchange", "20.54", "1.4%", "14", "0.68"),
)
_MPT_30B = (
    (165, "mC4 3.1.0 - English (200+ words)", "2417.99", "", "335", "0.14"),
    (166, "c4 - English - SemDedup 80%", "100.42", "29.9%", "299", "2.98"),
    (167, "RedPajama - CommonCrawl", "878.45", "8.5%", "85", "0.10"),
    (168, "The Stack - Selected Languages", "463.78", "10.0%", "100", "0.22"),
    (170, "RedPajama - Wikipedia", "4.87", "4.0%", "40", "8.21"),
    (171, "The Stack - Markdown", "107.07", "4.5%", "45", "0.42"),
    (172, "Semantic Scholar ORC", "48.95", "3.3%", "33", "0.67"),
    (173, "RedPajama - Books", "26.02", "3.0%", "30", "1.15"),
    (174, "RedPajama - arXiv", "28.1", "1.9%", "19", "0.68"),
    (175, "RedPajama - StackExchange", "20.54", "1.4%", "14", "0.68"),
)
_LLAMA = (  # line in dbrx, source, share, epochs, size on disk; implied tokens at 1.4T, and bytes of a token
    (492, "CommonCrawl", "67.0%", "1.10", "3.3 TB", "853B", "3.87"),
    (493, "C4", "15.0%", "1.06", "783 GB", "198B", "3.95"),
    (494, "Github", "4.5%", "0.64", "328 GB", "98.4B", "3.33"),
    (495, "Wikipedia", "4.5%", "2.45", "83 GB", "25.7B", "3.23"),
    (496, "Books", "4.5%", "2.23", "85 GB", "28.3B", "3.01"),
    (497, "ArXiv", "2.5%", "1.06", "92 GB", "33.0B", "2.79"),
    (498, "StackExchange", "2.0%", "1.03", "78 GB", "27.2B", "2.87"),
)
_LLAMA_TOKENS = 1.4e12
"""Touvron et al. 2023 (arXiv 2302.13971), table 1; the talks print the table without it."""
# fmt: on

Row = tuple[int, str, str, str, str, str]


def _key(source: str) -> str:
    return "-".join(source.lower().replace("-", " ").replace("(200+ words)", "").split())


def _pool_rows() -> Iterator[tuple[Cell, ...]]:
    cell = partial(Figure, "dbrx", "Exercise: Build a 1T Token Pretraining Set")
    sizes = {name: float(size[:-1]) * (1e12 if size.endswith("T") else 1e9) for _, name, size, _ in _POOL}
    for line, name, size, epochs in _POOL:
        even = partial(_epochs, tuple((source, holds, 1.0) for source, holds in sizes.items()), 1e12, name)
        how, what = "1T / 6 / its size", "Distribute evenly?"
        yield (
            name,
            cell(f"pool-{_key(name)}", line, f"{name} {size} ... {what}", size, even, how, "theirs", right=epochs),
        )


def _epochs(sources: Sequence[tuple[str, float, float]], tokens: float, name: str) -> float:
    return plan.mixture(sources, tokens)[name].epochs


def _share(sources: Sequence[tuple[str, float, float]], name: str) -> float:
    return plan.mixture(sources, 1e12)[name].share_frac


def _mpt_rows(talk: str, place: str, key: str, rows: Sequence[Row]) -> Iterator[tuple[Cell, ...]]:
    """Shares and epochs follow from what is taken."""
    cell = partial(Figure, talk, place)
    taken = tuple((name, float(holds) * 1e9, float(takes)) for _, name, holds, _, takes, _ in rows)
    for line, name, holds, share, takes, epochs in rows:
        source, of_share, of_epochs = (
            f"{key}-{_key(name)}",
            partial(_share, taken, name),
            partial(_epochs, taken, 1e12, name),
        )
        share_cell = cell(f"{source}-share", line, f"{name} {takes} {share}", share, of_share, "takes / 1000B")
        epochs_cell = cell(
            f"{source}-epochs", line, f"{name} {holds} {takes} {epochs}", epochs, of_epochs, "takes / holds"
        )
        if not share:
            blank = "the share is left blank; the others sum to 66.5%"
            share_cell = replace(share_cell, verdict="theirs", note=blank, right="33.5%")
        if (key, source) == ("mpt-7b", "mpt-7b-semantic-scholar-orc"):
            why = "33 / 48.95 = 0.674; MPT-30B's table has 0.67 for the same numbers"
            epochs_cell = replace(epochs_cell, verdict="wrong", note=why, right="0.674")
        yield name, holds, share_cell, takes, epochs_cell


def _llama_rows() -> Iterator[tuple[Cell, ...]]:
    """Tokens follow from share and epochs, bytes of a token from the size on disk."""
    cell = partial(Figure, "dbrx", "The Original Llama Dataset")
    for line, name, share, epochs, disk, tokens, width in _LLAMA:
        key, holds = _key(name), float(share[:-1]) / 100 * _LLAMA_TOKENS / float(epochs)
        stored = float(disk[:-3]) * {"TB": 1e12, "GB": 1e9}[disk[-2:]]
        of_epochs = partial(plan.per, float(share[:-1]) / 100 * _LLAMA_TOKENS, float(epochs))
        yield (
            name,
            share,
            cell(f"llama-{key}-tokens", line, f"{name} {share} {epochs}", epochs, of_epochs, "share x 1.4T / epochs",
                 "theirs", right=tokens),
            cell(f"llama-{key}-bytes", line, f"{name} {disk}", disk, partial(plan.per, stored, holds), "size / tokens",
                 "theirs", right=width),
        )  # fmt: skip


def _sum(rows: Sequence[Row], column: int) -> float:
    return sum(float(str(row[column]).rstrip("%") or 0) for row in rows)


# fmt: off
_ALONE = (
    Figure("dbrx", "Exercise: Build a 1T Token Pretraining Set", "pool", 459, "Build a 1T Token Pretraining Set", "1T",
           lambda: 2.4e12 + 400e9 + 7e9 + 47e9 + 60e9 + 5e9, "sum of the six", "theirs",
           "the pool holds nearly three times the set: 1T is a choice of a third of it", "2.92T"),
    Figure("mpt", "Data", "mpt-7b-budget", 183, "to fill our 1T token budget", "1T",
           lambda: _sum(_MPT_7B, 4) * 1e9, "sum of what is taken"),
    Figure("mpt", "MPT-7B Training Data", "mpt-7b-shares", 191, "Proportion", "all shares",
           lambda: _sum(_MPT_7B, 3) / 100, "sum of the shares", right="100.0%"),
    Figure("build", "Pick your proportions for 2T tokens", "mpt-30b-budget", 160, "Pick your proportions for 2T tokens",
           "2T", lambda: _sum(_MPT_30B, 4) * 1e9, "sum of what is taken", "wrong",
           "the table below the title is of 1T tokens; for 2T every source is gone through twice as often", "1.00T"),
    Figure("dbrx", "The Original Llama Dataset", "llama-shares", 491, "Sampling prop.", "all shares",
           lambda: sum(float(row[2][:-1]) for row in _LLAMA) / 100, "sum of the shares", "agrees",
           "the table is of 1.4T tokens (arXiv 2302.13971), which no slide says", "100.0%"),
    Figure("dbrx", "Attempt 3: Compute + Data Cost", "pile", 317, "The Pile An 800GB Dataset ... a 825 GiB", "800 GB",
           lambda: 825 * 2**30, "825 x 2^30 bytes", "wrong", "825 GiB are 886 GB, 800 GB are 745 GiB", "886 GB"),
    Figure("dbrx", "Attempt 3: Compute + Data Cost", "curriculum", 301, "2. Curriculum Learning ~1T tokens", "1T",
           lambda: 1e12 / 11e12, "1T / (10T + 1T)", "theirs",
           "the roundtable says the last 10% or 20% of training (line 150)", "9.1%"),
    Figure("build", "Key Questions", "semdedup", 234, "remove 50% of the data ... effectively halving training time",
           "halving", lambda: 1 / (1 - 0.5), "1 / (1 - 50%)", "agrees", "at as many epochs", "2.0x"),
)
# fmt: on

SECTIONS = (
    Section(
        "Data mixtures",
        "Tokens taken = share x tokens of the run; epochs = tokens taken / tokens in the source. `smalti plan data` "
        "computes this for any mixture, with what repeated tokens are worth ([plan a run](../guides/plan.md)).",
        (
            Table(
                "Build a 1T Token Pretraining Set (dbrx, lines 461-467): distributed evenly, how often is each gone "
                "through?",
                ("dataset", "size (epochs)"),
                tuple(_pool_rows()),
            ),
            Table(
                "MPT-7B Training Data (mpt, lines 191-201), tokens in billions",
                ("source", "holds", "share", "takes", "epochs"),
                tuple(_mpt_rows("mpt", "MPT-7B Training Data", "mpt-7b", _MPT_7B)),
            ),
            Table(
                "MPT-30B Training Data (build, lines 164-175), tokens in billions",
                ("source", "holds", "share", "takes", "epochs"),
                tuple(_mpt_rows("build", "Pick your proportions for 2T tokens", "mpt-30b", _MPT_30B)),
            ),
            Table(
                "The Original Llama Dataset (dbrx, lines 491-498; build, lines 179-186)",
                ("dataset", "share", "epochs (tokens in it, for 1.4T)", "disk size (bytes a token)"),
                tuple(_llama_rows()),
            ),
        ),
        _ALONE,
    ),
)
