"""The section ``profile``: which steps to profile."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.config.schema import Config, NotAllowed, Whole, placement


class ProfileConfig(Config):
    """A window of steps whose operators, memory and collectives are written to ``profile/`` in the run folder."""

    steps: tuple[Whole, Whole] | None = placement(None)
    """First and last step of the window, counted from 1, at most 100 steps; absent: no profile."""
    ranks: tuple[Whole, ...] | Literal["all"] = placement((0,))
    """Ranks that write a profile."""

    @model_validator(mode="after")
    def _window_of_steps(self) -> Self:
        if self.steps is None:
            if self.ranks != (0,):
                raise NotAllowed(
                    f"profile.ranks={self.ranks} has no effect without profile.steps",
                    allowed="both, or neither",
                    hint="profile.steps=[10,12]",
                )
            return self
        first, last = self.steps
        if not 1 <= first <= last:
            raise NotAllowed(
                f"profile.steps=[{first},{last}] is no window",
                allowed="first and last step, from 1, the first not above the last",
                hint=f"profile.steps=[{max(1, min(first, last))},{max(1, first, last)}]",
            )
        if last - first >= 100:
            raise NotAllowed(
                f"profile.steps=[{first},{last}] are {last - first + 1} steps; the traces would be gigabytes",
                allowed="at most 100 steps",
                hint=f"profile.steps=[{first},{first + 2}]",
            )
        return self

    def of_rank(self, rank: int) -> bool:
        """Return whether this rank writes a profile."""
        return self.steps is not None and (self.ranks == "all" or rank in self.ranks)
