"""The section ``launch``: how ``smalti fleet launch`` queues and runs a recipe. ``smalti train`` does not read it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, Count, NotAllowed, WallTime, Whole, placement

RetryCause = Literal["fault", "killed", "lost"]
"""Why an attempt ended that may be repeated: ``smalti train`` ended with exit code 75 or 143 without being asked to; it
was killed by a signal; its parent process was killed, or the machine was restarted."""

SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]

Level = Literal["low", "normal", "high"]
_LEVELS: dict[Level, int] = {"low": 10, "normal": 50, "high": 90}


class LaunchConfig(Config):
    """Priority, limits and dependencies of a run in the queue of a cluster."""

    gpus: Count | None = placement(None)
    """GPUs of the run, one for each rank; absent: ``train.parallel.ranks``, on GPUs where the machine has some."""
    priority: Level | Whole = placement("normal")
    """low (10), normal (50), high (90), or a number from 0 to 100; a higher one starts first."""
    preemptible: bool = placement(False)
    """A run of higher priority that lacks room may stop this one, which saves first and continues later."""
    max_duration: WallTime | None = placement(None)
    """Longest time that all attempts together may run; then the run saves and is stopped. Absent: no limit."""
    retries: Whole = placement(10, ge=0)
    """Most attempts that follow a fault, beside those that ``smalti train`` starts by itself (``train.restart``)."""
    retries_by_cause: dict[RetryCause, Whole] = placement({})
    """Most attempts that follow one cause: fault, killed, lost. Absent: as many as ``retries``."""
    depends_on: tuple[str, ...] = placement(())
    """Ids of runs that must be completed before this one is queued."""

    secrets: tuple[SecretName, ...] = placement(())
    """Names of environment variables that the run gets with secret values: those of the command that launches it, else
    those that ``smalti fleet secret set NAME`` has stored. No value is recorded in a config, log or database."""

    @property
    def level(self) -> int:
        """The priority as a number."""
        return self.priority if isinstance(self.priority, int) else _LEVELS[self.priority]

    @model_validator(mode="after")
    def _numbers_are_allowed(self) -> Self:
        if not 0 <= self.level <= 100:
            raise NotAllowed(
                f"launch.priority={self.priority}", allowed="low, normal, high, or 0 to 100", hint="launch.priority=low"
            )
        for cause, count in self.retries_by_cause.items():
            if not 0 <= count <= self.retries:
                raise NotAllowed(
                    f"launch.retries_by_cause.{cause}={count}",
                    allowed=f"0 to launch.retries={self.retries}",
                    hint=f"launch.retries={max(count, 1)}",
                )
        return self
