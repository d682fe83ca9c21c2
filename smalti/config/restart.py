"""The section ``train.restart``: when the agent starts the next attempt by itself, and when it detects a hang."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.config.schema import Config, Count, NotAllowed, NotNegative, WallTime, Whole, placement

Cause = Literal["killed", "exception", "hang", "network", "disk", "reported", "slow", "node"]
"""Why an attempt ended: a rank was killed by a signal; raised an exception; made no progress; the ranks lost each
other; a disk is full or fails; a rank reported another fault that may pass (exit code 75); MFU fell
(``train.health.mfu_below``); a node was lost (``train.nodes``)."""


class RestartConfig(Config):
    """What follows a fault. Only ``smalti train`` that starts the ranks itself restarts them; torchrun has its own
    options."""

    attempts: Whole = placement(100, ge=0)
    """Most restarts of one command; 0: none, so that a fault ends it: with exit code 75, or that of an exception."""
    budget: dict[Cause, NotNegative] = placement({})
    """Most restarts for a cause: killed, exception, hang, network, disk, reported, slow, node; 0: none. Absent:
    ``attempts``."""
    no_progress: Count = placement(3)
    """So many attempts in a row without a newer checkpoint end the command with exit code 93."""
    min_ranks: Count | None = placement(None)
    """If the same rank fails twice in a row, or a node is lost and none has joined in its place (``train.nodes``),
    continue without it, on at least so many ranks. Absent: always on all."""
    grow_after: WallTime = placement("1h")
    """After so long on fewer ranks, save and continue on all; twice as long each time that it had to shrink again."""
    hang_floor: WallTime = placement("10s")
    """A rank whose step makes no progress is not taken for hanging before this time has passed."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.attempts == 0 and (self.budget or self.min_ranks is not None):
            name = "budget" if self.budget else "min_ranks"
            raise NotAllowed(
                f"train.restart.{name} has no effect with train.restart.attempts=0",
                allowed="restarts with a budget, or none",
                hint=f"remove train.restart.{name}, or set train.restart.attempts=100",
            )
        if self.min_ranks is None and self.grow_after != "1h":
            raise NotAllowed(
                f"train.restart.grow_after={self.grow_after} has no effect without train.restart.min_ranks",
                allowed="a run that may continue on fewer ranks",
                hint="train.restart.min_ranks=1",
            )
        return self
