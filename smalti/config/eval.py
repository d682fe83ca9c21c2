"""The config of ``smalti eval run``, and the suites that are found by name."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smalti.base.errors import nearest
from smalti.config.schema import Cadence, Config, NotAllowed, Real, Whole, split_duration
from smalti.config.task import Mode, TaskConfig


class EvalConfig(Config):
    """Tasks, amount of data and seed. Equal configs give a model exactly the same questions."""

    suite: str = Field("demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the suite and of its results folder."""
    tasks: tuple[TaskConfig | str, ...] = Field(("heldout", "arithmetic", "brackets"), min_length=1)
    """The tasks, in order: names, paths of YAML files, or tasks written here."""
    mode: Mode = "fixed"
    """How tasks of files are asked and graded: ``v0.3`` as LLM Foundry 0.3 does, ``fixed`` without its defects."""
    chat: bool = True
    """Ask tasks of files through the model's chat template, if it has one; ``v0.3`` never does."""
    data: str | None = None
    """Folder of the Gauntlet's files, in LLM Foundry's layout (``world_knowledge/arc_easy.jsonl``)."""
    limit: Whole | None = Field(None, ge=1)
    """Ask at most this many questions of each task of a file: in ``v0.3`` the first ones, in ``fixed`` a sample."""
    cut_prompts: bool = True
    """Ask prompts that are longer than the context without their start; false: they are an error, and a benchmark of
    the Gauntlet that has some is left out, with the reason."""
    task_shots: Whole | None = Field(None, ge=0)
    """Number of solved examples before each question of a task of a file; absent: the task's own. Only in ``fixed``,
    and not for kind ifeval."""
    heldout: dict[str, str] = Field(default_factory=dict)
    """Name -> folder of held-out token files, or a .txt, .md or .jsonl (field ``text``) file; absent: the run's
    ``data.heldout``."""
    seq_len: Whole | None = Field(None, ge=2)
    """Longest context in tokens; absent: the run's ``data.seq_len``; for other models their longest, at most 2048."""
    max_bytes: Whole | None = Field(2_000_000, ge=1)
    """Maximum of held-out text of each source in bytes, in whole documents chosen by the seed; null: all."""
    overlap_frac: Real = Field(0.25, ge=0, lt=1)
    """Fraction of each window of a long held-out document that overlaps the previous one, as unscored context; 0.5
    gives a slightly lower value (0.0005 bits per byte on the demo's text) and processes half as many tokens again."""
    resamples: Whole = Field(1000, ge=2)
    """Number of bootstrap resamples for the standard error of bits per byte."""
    n: Whole = Field(200, ge=1)
    """Number of questions of each generated task."""
    shots: Whole = Field(5, ge=0)
    """Number of solved examples before each question of a generated task; of tasks of files: ``task_shots``."""
    seed: Whole = 1
    """Seed of questions, documents and resamples."""
    batch_tokens: Whole = Field(4096, ge=1)
    """Tokens in one forward pass; affects only speed and memory."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _tasks_are_a_list(cls, tasks: Any) -> Any:
        if isinstance(tasks, str):
            raise NotAllowed(f"'{tasks}' is no list", allowed="a list of tasks", hint=f"'tasks=[{tasks}]'")
        return tasks

    @model_validator(mode="after")
    def _published_shots_are_fixed(self) -> Self:
        if self.mode == "v0.3" and self.task_shots is not None:
            raise NotAllowed(
                "task_shots has no effect in mode v0.3, which has LLM Foundry's shots",
                allowed="mode=fixed with task_shots, or mode=v0.3 without",
                hint="remove task_shots",
            )
        return self


class InLoopConfig(EvalConfig):
    """Tasks during training. Other fields change the suite's."""

    every: Cadence = "0.1run"
    """How often the tasks run, in steps, tokens or a fraction of the run; always at the end. Tasks with generated
    answers run on the next checkpoint that is saved."""
    threads: Whole = Field(1, ge=1)
    """CPU threads of the child process that generates answers."""
    priority: Literal["idle", "normal"] = "idle"
    """Priority of that process: ``idle`` uses processor time that nothing else wants, ``normal`` competes with
    training."""

    @model_validator(mode="before")
    @classmethod
    def _take_the_suite(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("suite", "demo")
        if name not in suites():
            if "tasks" not in value:
                close = nearest(str(name), suites())
                raise NotAllowed(
                    f"there is no suite '{name}'",
                    allowed=f"{', '.join(suites())}, or a name of your own with tasks",
                    hint=f"did you mean evals.suite={close}?" if close else "'evals.tasks=[mine.yaml]'",
                )
            return value
        return {**suites()[name].model_dump(mode="json"), **value}

    @field_validator("every")
    @classmethod
    def _every_rank_agrees(cls, every: str) -> str:
        if split_duration(every)[1] in ("s", "min", "h"):
            raise NotAllowed(
                f"'{every}' is a time, and ranks may see different clocks",
                allowed="steps, tokens or a fraction of the run",
                hint="evals.every=0.1run",
            )
        return every


def suites() -> dict[str, EvalConfig]:
    """Return the suites that ship with Smalti, by name."""
    return {
        "demo": EvalConfig(),
        "heldout": EvalConfig(suite="heldout", tasks=("heldout",), max_bytes=None),
        "gauntlet": EvalConfig(suite="gauntlet", tasks=("gauntlet",)),
        "lm-eval": EvalConfig(suite="lm-eval", tasks=("arc_easy", "hellaswag", "piqa", "winogrande")),
    }


def task_lines() -> dict[str, str]:
    """Return what each task measures, in a line."""
    return {
        "heldout": "bits per byte of held-out text, each source beside gzip -9 and xz -9 (lower is better)",
        "arithmetic": "23+4=27 from examples, ranked by likelihood among 10 sums (chance 0.1)",
        "brackets": "close ([{< from examples, ranked by likelihood among 6 endings (chance 1/6)",
        "needle_TOKENS": "find one of ten facts in a text of so many tokens, by depth: needle_2048 (chance 0.1)",
        "copy_TOKENS": "continue a passage of a text of random words, by depth: copy_1024 (chance 0.1)",
        "gauntlet": "all benchmarks of the Gauntlet whose files are in data=DIR, with category and core averages",
    }
