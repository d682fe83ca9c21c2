"""Tasks of IFEval's kind: answers to prompts with instructions that a program can verify."""

from collections.abc import Sequence

from smalti.config.eval import EvalConfig
from smalti.config.task import TaskConfig
from smalti.data.tokenizer.chat import ChatFormat
from smalti.evals.graders.ifeval.grading import Kind, grade, summarize
from smalti.evals.graders.ifeval.rows import load_rows
from smalti.evals.likelihood import Progress
from smalti.evals.results import TaskResult
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.generation import complete, shares
from smalti.evals.tasks.items import Item
from smalti.serve.engine.engine import Engine

MAX_NEW_TOKENS = 1280
"""Longest answer by default, as lm-evaluation-harness has it."""


def run(
    name: str,
    task: TaskConfig,
    items: Sequence[Item],
    engine: Engine,
    config: EvalConfig,
    seq_len: int,
    progress: Progress = lambda done, total: None,
    *,
    chat: ChatFormat | None = None,
) -> TaskResult:
    """Generate an answer to each prompt; its accuracy is the share of prompts with all instructions followed, strictly.

    By ``fixed`` verdicts, and in mode ``v0.3`` by official ones; ``instructions`` has all accuracies by both.
    """
    rows = {str(row.key): row for row in load_rows(task.file)}
    n_new = task.max_new_tokens or MAX_NEW_TOKENS
    stop = task.stop if chat is None else chat.stops
    completed = complete(task, items, engine, config, seq_len, chat, n_new=n_new, stop=stop)
    progress(1, 1)
    kind: Kind = "official" if config.mode == "v0.3" else "fixed"
    samples, grades = [], []
    for answer in completed:
        grades.append(grade(rows[str(answer.prompt.item.id)], answer.text))
        correct = all(verdict["strict"][kind] for verdict in grades[-1])
        samples.append({**answer.sample(), "instructions": grades[-1], "correct": correct})
    score = accuracy(samples, 0.0) | shares(completed)
    about = {"instructions": summarize(grades), "verdicts": kind, "max_new_tokens": n_new, "mode": config.mode}
    return TaskResult(name, {**score, **about}, samples)
