"""Evaluates a way with the tasks of its questions and the held-out sets, by ``evals.suite``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.config.eval import EvalConfig
from smalti.config.run import RunConfig
from smalti.data.examples.folder import RECORD_NAME
from smalti.data.tokenizer.chat import ChatFormat, load_chat
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.checkpoint.export import export
from smalti.evals import suite
from smalti.evals.samples import Results, Sample, read_results
from smalti.serve.engine.engine import Engine
from smalti.track.checkpoints.names import step_of
from smalti.track.run import RunFolder
from smalti.train.origin import run_of
from smalti.tune.compare.questions import ANSWERS, LIKELIHOOD, Asked

SUITE = "tune"
HELDOUT = "heldout"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Model:
    """A model to ask: its folder, and the format of its conversations."""

    folder: str
    chat: ChatFormat

    @property
    def stamp(self) -> list[Any]:
        """Size and time of the weights, by which another model of the same folder is noticed."""
        files = sorted(Path(self.folder).glob("*.safetensors"))
        return [self.folder, *([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files)]


def base_model(config: RunConfig, folder: Path) -> Model:
    """Return the model of ``init_from``, in the format that it has itself; a run or checkpoint is exported first."""
    assert config.init_from is not None
    run = run_of(Path(config.init_from))
    if run is None:
        return Model(config.init_from, load_chat(config.init_from))
    is_run = Path(config.init_from).resolve() == run.resolve()
    source = checkpoint.newest(run / "checkpoints") if is_run else config.init_from
    step = step_of(str(source)) if source is not None else None
    output, record = folder / "base", folder / "base" / "export.json"
    if not (record.is_file() and store.read_json(record)["step"] == step):
        export(run, step=step, output=output)
    return Model(str(output), load_chat(output))


def tuned_model(run: Path, config: RunConfig) -> Model:
    """Return the model of the last checkpoint of a finished run. The best one was chosen on the questions."""
    step = config.length.total_steps
    folder = export(run, step=step, merge=config.adapter is not None)
    return Model(folder, load_chat(folder))


def trained_s(run: Path) -> float:
    """Return the seconds of all training steps of a run."""
    return 3600 * max((row["time/train"] for row in RunFolder.read(run).metrics() if "time/train" in row), default=0.0)


def heldout_of(config: RunConfig) -> dict[str, str]:
    """Return the held-out sets of a recipe that are text, so not those of examples."""
    return {name: path for name, path in config.data.heldout.items() if not (Path(path) / RECORD_NAME).is_file()}


def evaluate(
    engine: Engine, model: Model, asked: Asked, heldout: dict[str, str], seq_len: int, output: Path, progress: Progress
) -> dict[str, Any]:
    """Ask the questions, score the held-out sets, and return what ``results.json`` has."""
    tasks = (*asked.tasks, *([HELDOUT] if heldout else []))
    config = EvalConfig(suite=SUITE, tasks=tasks, heldout=heldout, seq_len=seq_len)
    return suite.run(
        engine, config, str(output), about={"model_folder": model.folder}, progress=progress, chat=model.chat
    )


def samples_of(folder: str) -> tuple[Results, dict[str, list[Sample]]]:
    """Return the results in a folder, and their samples by task, in the order of the questions."""
    results = read_results(Path(folder))
    by_task: dict[str, list[Sample]] = {}
    for sample in results.samples:
        by_task.setdefault(sample.task, []).append(sample)
    return results, {task: sorted(samples, key=lambda sample: sample.index) for task, samples in by_task.items()}


def nats_and_bytes(samples: Sequence[Sample]) -> tuple[list[float], list[int]]:
    """Return nats and UTF-8 bytes of the right answers, or of held-out documents.

    The blank that a plain conversation has before an answer is not counted, so that the bytes of all ways are equal.
    """
    if samples[0].task == LIKELIHOOD:
        return [-sample.log_likelihoods[0] for sample in samples], [len(s.choices[0].encode()) for s in samples]
    return [sample.nats or 0.0 for sample in samples], [sample.n_bytes or 0 for sample in samples]


def seconds_of_answer(results: Results) -> float | None:
    """Return the seconds of a generated answer, all of them answered together; None where none was generated."""
    score = results.about["tasks"].get(ANSWERS)
    return None if score is None else score["wall_s"] / score["n"]
