"""``smalti tune sft`` on the recipe of bench/tune_trl.py, one step at a time; started by it."""

from typing import Any

from train_turns import Turns

from smalti.cli.working_directory import load_run
from smalti.train import Hook, build, fit


class TakeTurns(Hook):
    """Waits for the parent before each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_start(self, job: Any) -> None:
        """The first step."""
        self._turns.ready()
        self._turns.boundary()

    def on_step(self, job: Any, result: Any) -> None:
        """Every other step."""
        self._turns.loss = float(result.loss)
        self._turns.boundary()


def main() -> None:
    """Train as the command does, in this process."""
    turns = Turns()
    fit(build(load_run(turns.job["recipe"], []).config, hooks=[TakeTurns(turns)]))


if __name__ == "__main__":
    main()
