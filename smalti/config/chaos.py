"""The section ``chaos``: faults that a run injects into itself, to test that it survives them."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.base.rng import derive_key
from smalti.config.schema import Config, NotAllowed, Real, WallTime, Whole, placement

Kind = Literal[
    "sigkill",
    "sigstop",
    "segfault",
    "held_gil",
    "exception",
    "deadlock",
    "stuck_data",
    "slow_rank",
    "full_disk",
    "read_only_disk",
    "corrupt_shard",
    "store_503",
    "clock_jump",
    "agent_death",
    "store_death",
    "half_open_tcp",
    "cut_line",
]
"""The faults; ``docs/guides/faults.md`` says what each does."""

PhaseName = Literal["init", "data", "forward", "backward", "optimizer", "checkpoint", "eval"]

_LASTING = (
    "sigstop", "held_gil", "stuck_data", "slow_rank", "full_disk", "read_only_disk", "store_503", "clock_jump",
    "cut_line",
)  # fmt: skip
"""Kinds that may end before the process does."""
_PHASE_OF: dict[str, PhaseName] = {"stuck_data": "data", "slow_rank": "forward", "corrupt_shard": "checkpoint"}
"""Kinds that occur in one phase only."""
_SEVERAL_RANKS = ("deadlock",)

LLAMA_3: tuple[tuple[str, int, Kind], ...] = (
    ("faulty-gpu", 148, "exception"),
    ("hbm3", 72, "sigkill"),
    ("software-bug", 54, "segfault"),
    ("switch-or-cable", 35, "deadlock"),
    ("host-maintenance", 32, "sigkill"),
    ("gpu-sram", 19, "exception"),
    ("gpu-system-processor", 17, "sigstop"),
    ("nic", 7, "deadlock"),
    ("nccl-watchdog", 7, "deadlock"),
    ("silent-corruption", 6, "corrupt_shard"),
    ("thermal", 6, "slow_rank"),
    ("ssd", 3, "stuck_data"),
    ("power-supply", 3, "sigkill"),
    ("chassis", 2, "sigkill"),
    ("io-board", 2, "sigkill"),
    ("dependency", 2, "stuck_data"),
    ("cpu", 2, "held_gil"),
    ("memory", 2, "segfault"),
)
"""(cause, count, kind): the 419 unexpected interruptions of Llama 3 405B (arXiv 2407.21783, table 5), each with the
fault that looks like it to the other ranks. The kinds are our choice; all can be injected on any machine."""


class FaultConfig(Config):
    """One fault of one rank. It is injected once, also where the run is restarted."""

    kind: Kind = placement()
    """What happens."""
    rank: Whole = placement(0, ge=0)
    """The rank that it happens to."""
    step: Whole | None = placement(None, ge=1)
    """The step, counted from 1, in which it happens; with the phases ``checkpoint`` and ``eval`` the first one after
    that step. Required, but not with ``phase: init``."""
    phase: PhaseName | None = placement(None)
    """The phase at whose start it happens; absent: ``forward``. ``init`` is after the checkpoint was loaded."""
    attempt: Whole | None = placement(None, ge=0)
    """The attempt; absent: the first one that reaches step and phase."""
    duration: WallTime | None = placement(None)
    """How long it lasts; absent: until the process ends."""
    slowdown: Real | None = placement(None, gt=1)
    """With ``slow_rank``: how many times as long its forward pass takes; absent: 2."""

    @property
    def at_phase(self) -> PhaseName:
        """The phase, with the default applied."""
        return self.phase or _PHASE_OF.get(self.kind, "forward")

    @property
    def label(self) -> str:
        """The fault in words, such as ``sigkill of rank 1 at step 20 in forward``; it identifies a fault of a run."""
        step = "" if self.step is None else f" at step {self.step}"
        attempt = "" if self.attempt is None else f" of attempt {self.attempt}"
        return f"{self.kind} of rank {self.rank}{step} in {self.at_phase}{attempt}"

    @model_validator(mode="after")
    def _can_happen(self) -> Self:
        only = _PHASE_OF.get(self.kind)
        if only is not None and self.at_phase != only:
            raise NotAllowed(
                f"{self.kind} with phase={self.phase}", allowed=only, hint=f"phase={only}, or remove phase"
            )
        if self.step is None and self.at_phase != "init":
            raise NotAllowed(
                f"{self.kind} without a step", allowed="a step from 1 on", hint="step=10, or phase=init for the start"
            )
        if self.step is not None and self.at_phase == "init":
            raise NotAllowed(
                f"step={self.step} has no effect with phase=init", allowed="phase and attempt", hint="remove step"
            )
        if self.duration is not None and self.kind not in _LASTING:
            raise NotAllowed(
                f"duration={self.duration} has no effect on {self.kind}", allowed=", ".join(_LASTING),
                hint="remove duration",
            )  # fmt: skip
        if self.slowdown is not None and self.kind != "slow_rank":
            raise NotAllowed(f"slowdown has no effect on {self.kind}", allowed="slow_rank", hint="remove slowdown")
        return self


class ChaosConfig(Config):
    """Faults that are injected into the run: those of the list, and those of the mix."""

    faults: tuple[FaultConfig, ...] = placement(())
    """The faults, each with its rank and step."""
    mix: Literal["llama3"] | None = placement(None)
    """Draw faults with the frequencies of Llama 3's 419 causes of interruptions; absent: only those of the list."""
    count: Whole = placement(5, ge=1, le=1000)
    """Faults to draw: one in each of so many equal parts of the run."""
    seed: Whole = placement(0)
    """Seed of the mix. Kinds and steps do not depend on the number of ranks, the ranks that they happen to do."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.mix is None and (self.count, self.seed) != (5, 0):
            raise NotAllowed(
                "chaos.count and chaos.seed have no effect without chaos.mix", allowed="llama3",
                hint="chaos.mix=llama3",
            )  # fmt: skip
        labels = [fault.label for fault in self.faults]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise NotAllowed(f"chaos.faults has '{twice}' twice", allowed="each fault once", hint="remove one")
        return self

    def planned(self, *, total_steps: int, ranks: int) -> tuple[FaultConfig, ...]:
        """Return all faults of a run of that length on so many ranks, those of the mix drawn.

        Raises NotAllowed for a rank or a step that the run does not have.
        """
        for fault in self.faults:
            _require_in_run(fault, total_steps, ranks)
        return (*self.faults, *(self._drawn(total_steps, ranks) if self.mix else ()))

    def without_ranks_from(self, ranks: int) -> Self:
        """Return the config without the faults of ranks that a world of ``ranks`` does not have."""
        return self.model_copy(update={"faults": tuple(fault for fault in self.faults if fault.rank < ranks)})

    def _drawn(self, total_steps: int, ranks: int) -> list[FaultConfig]:
        """Return the faults of the mix: in each part of the run one, after its first step.

        Kinds and steps are drawn first and are the same on any number of ranks (but on one rank a kill replaces a
        deadlock); the rank is another draw, modulo their number.
        """
        part = total_steps / self.count
        if part < 4:
            raise NotAllowed(
                f"chaos.count={self.count} faults in {total_steps} steps", allowed="at most one every 4 steps",
                hint=f"chaos.count={max(1, total_steps // 4)}",
            )  # fmt: skip
        drawn: list[FaultConfig] = []
        for number in range(self.count):
            kind = _kind(derive_key(self.seed, "kind", number) % sum(n for _, n, _ in LLAMA_3))
            step = int(number * part) + 2 + derive_key(self.seed, "step", number) % (int(part) - 2)
            kind = "sigkill" if ranks == 1 and kind in _SEVERAL_RANKS else kind
            rank = derive_key(self.seed, "rank", number) % ranks
            drawn.append(FaultConfig(kind=kind, rank=rank, step=step, duration="5s" if kind == "slow_rank" else None))
            if kind == "corrupt_shard":  # found only by the next attempt
                drawn.append(FaultConfig(kind="sigkill", rank=rank, step=step + 1))
        return drawn


def _kind(ordinal: int) -> Kind:
    for _, count, kind in LLAMA_3:
        if ordinal < count:
            return kind
        ordinal -= count
    raise AssertionError("an ordinal below the sum of the counts")


def _require_in_run(fault: FaultConfig, total_steps: int, ranks: int) -> None:
    if fault.rank >= ranks:
        raise NotAllowed(
            f"chaos.faults has a {fault.kind} of rank {fault.rank} of {ranks}",
            allowed=f"0 to {ranks - 1}",
            hint=f"rank={ranks - 1}",
        )
    if fault.step is not None and fault.step > total_steps:
        raise NotAllowed(
            f"chaos.faults has a {fault.kind} at step {fault.step} of {total_steps}",
            allowed=f"1 to {total_steps}",
            hint=f"step={max(1, total_steps // 2)}",
        )
    if fault.kind in _SEVERAL_RANKS and ranks == 1:
        raise NotAllowed(
            f"chaos.faults has a {fault.kind} in a run of one rank",
            allowed="at least two ranks: it is a collective that the others do not enter",
            hint="train.parallel.ranks=2",
        )
