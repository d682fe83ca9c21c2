"""The evaluations of a training run: held-out loss and tasks at the steps that are due, each after the step is saved.

What an attempt has saved and not evaluated, because it was stopped or killed, the next one evaluates. With
``train.ema`` the held-out loss of the averaged weights is measured too, beside that of the weights.
"""

from typing import TYPE_CHECKING

from torch import nn

from smalti.base import clock
from smalti.distributed.group.world import broadcast_from_rank0
from smalti.track.names import EVAL, EVAL_EMA
from smalti.track.progress import Phase
from smalti.track.run import RunFolder
from smalti.train.cadence import Cadence

if TYPE_CHECKING:
    from smalti.train.loop import Evaluate, Job


class Evaluations:
    """Runs the evaluations of a job, on all ranks together."""

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._heldout_when = Cadence(job.config.train.eval_every, job.length)
        self._tasks_when = Cadence(job.tasks_every or "1run", job.length)

    def heldout_is_due(self, step: int) -> bool:
        """Return whether held-out loss is due after a step, as this rank sees it."""
        return self._heldout_when.due(step)

    @property
    def tasks_are_due(self) -> bool:
        """Whether tasks are due now: a function of the step."""
        return self._job.evaluate_tasks is not None and (self._is_last or self._tasks_when.due(self._job.state.step))

    def run(self, *, heldout: bool) -> None:
        """Run the tasks that are due, after held-out loss if ``heldout``; both after the last step."""
        if heldout or self._is_last:
            self._evaluate_heldout()
            self._heldout_when.done()
        if self.tasks_are_due:
            self._evaluate(self._job.evaluate_tasks)

    def run_at_start(self) -> None:
        """Measure the held-out loss of weights that were loaded, or run what the checkpoint's step lacks."""
        job, step = self._job, self._job.state.step
        if step == 0:
            if job.config.init_from is not None:
                self._evaluate_heldout()
            return
        heldout_is_due = job.evaluate is not None and (self._is_last or self._heldout_when.due(step))
        if not (heldout_is_due or self.tasks_are_due):
            return
        has_heldout, has_tasks = broadcast_from_rank0(lambda: _evaluated(job.folder, step))
        if heldout_is_due and not has_heldout:
            self._evaluate_heldout()
        if self.tasks_are_due and not has_tasks:
            self._evaluate(job.evaluate_tasks)

    @property
    def _is_last(self) -> bool:
        return self._job.state.step >= self._job.total_steps

    def _evaluate_heldout(self) -> None:
        """Measure held-out loss, and after the first step that of the moving average of the weights."""
        evaluate, average = self._job.evaluate, self._job.state.average
        if evaluate is None or average is None or self._job.state.step == 0:
            self._evaluate(evaluate)
            return

        def evaluate_both(model: nn.Module, step: int) -> dict[str, float]:
            metrics = evaluate(model, step)
            self._job.state.before_update()  # a running save has copied weights and average
            with average.as_weights(model):
                of_average = evaluate(model, step)
            return metrics | {name.replace(EVAL, EVAL_EMA, 1): value for name, value in of_average.items()}

        self._evaluate(evaluate_both)

    def _evaluate(self, evaluate: "Evaluate | None") -> None:
        job = self._job
        if evaluate is None:
            return
        began_s = clock.now_s()
        # each pass through the model is progress: an evaluation may be longer than any limit of a hang
        beats = job.state.model.register_forward_pre_hook(lambda *_: job.state.progress.beat())
        try:
            with job.state.progress.within(Phase.EVAL):
                metrics = evaluate(job.state.model, job.state.step)
        finally:
            beats.remove()
        seconds = clock.now_s() - began_s
        job.recorder.add_non_step_time(seconds, is_eval=True)
        job.recorder.write(job.state.step, metrics)
        job.events.write("eval", step=job.state.step, seconds=round(seconds, 3), metrics=metrics)
        for hook in job.hooks:
            hook.on_eval(job, metrics)


def _evaluated(folder: RunFolder, step: int) -> tuple[bool, bool]:
    """Return whether held-out loss and tasks were measured at a step."""
    events = [event for event in folder.events() if event.get("event") == "eval" and event.get("step") == step]
    are_tasks = [any(name.startswith("icl/") for name in event.get("metrics") or ()) for event in events]
    return not all(are_tasks), any(are_tasks)
