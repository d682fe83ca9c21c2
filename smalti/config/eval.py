"""The config of ``smalti eval run``, and the suites that are found by name."""

from typing import Literal

from pydantic import Field

from smalti.config.schema import Config, Real, Whole

TaskName = Literal["heldout", "arithmetic", "brackets"]


class EvalConfig(Config):
    """Which tasks, on how much, from which seed. Equal configs ask a model exactly the same questions."""

    suite: str = Field("demo", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*")
    """Name of the suite, and of its folder of results."""
    tasks: tuple[TaskName, ...] = Field(("heldout", "arithmetic", "brackets"), min_length=1)
    """The tasks, in order."""
    heldout: dict[str, str] = Field(default_factory=dict)
    """Name -> folder of held-out token files; absent for a run: those of the run's ``data.heldout``."""
    seq_len: Whole | None = Field(None, ge=2)
    """Longest context in tokens; absent: the run's ``data.seq_len``, for other models their longest (at most 2048)."""
    max_bytes: Whole | None = Field(2_000_000, ge=1)
    """At most this much held-out text of each source, in whole documents chosen by the seed; null takes all."""
    overlap_frac: Real = Field(0.25, ge=0, lt=1)
    """Share of each window of a long held-out document that is read again, as context, and not scored; 0.5 gives a
    slightly lower figure (0.0005 bits per byte on the demo's text) for half as many tokens again to read."""
    resamples: Whole = Field(1000, ge=2)
    """Bootstrap resamples for the error of bits per byte."""
    n: Whole = Field(200, ge=1)
    """Questions of each generated task."""
    shots: Whole = Field(5, ge=0)
    """Solved examples before each question of a generated task."""
    seed: Whole = 1
    """Chooses questions, documents and resamples."""
    batch_tokens: Whole = Field(4096, ge=1)
    """Tokens in one forward pass; changes speed and memory only."""


def suites() -> dict[str, EvalConfig]:
    """The suites that ship with Smalti, by name."""
    return {
        "demo": EvalConfig(),
        "heldout": EvalConfig(suite="heldout", tasks=("heldout",), max_bytes=None),
    }


def task_lines() -> dict[TaskName, str]:
    """What each task measures, in a line."""
    return {
        "heldout": "bits per byte of held-out text, each source beside gzip -9 and xz -9 (lower is better)",
        "arithmetic": "23+4=27 from examples, ranked by likelihood among 10 sums (chance 0.1)",
        "brackets": "close ([{< from examples, ranked by likelihood among 6 endings (chance 1/6)",
    }
