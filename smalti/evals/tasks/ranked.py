"""Tasks scored by likelihood: the likeliest of several options, or a continuation that is the likeliest text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.base.rng import derive_key
from smalti.config.eval import EvalConfig
from smalti.config.task import Mode, TaskConfig
from smalti.data.tokenizer.chat import ChatFormat
from smalti.evals.graders.baselines import have_labels, majority, permuted
from smalti.evals.likelihood import Scores, Window
from smalti.evals.results import TaskResult
from smalti.evals.statistics.intervals import verdict
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.generated import generator
from smalti.evals.tasks.items import Item
from smalti.evals.tasks.prompts import limit_of, make_prompts, shots_of
from smalti.evals.tasks.windows import Encoder, TooLong, differing_windows, option_windows, require_whole

Rank = Callable[[Scores, "Question"], NDArray[np.float64]]
"""Values of the options; the least is chosen."""


@dataclass(frozen=True)
class Question:
    """An item as the model sees it: its prompt, a window for each option, and the text that each window scores."""

    item: Item
    prompt: str
    windows: Sequence[Window]
    texts: Sequence[str]
    cut: bool = False


@dataclass(frozen=True)
class RankedTask:
    """A task whose questions are made; they can be scored by any model that has their tokenizer."""

    name: str
    questions: Sequence[Question]
    rank: Rank
    choose: Callable[[Item, NDArray[np.float64]], int]
    """(item, values of its options) -> the chosen option."""
    score_of: Callable[[list[dict[str, Any]]], dict[str, Any]]

    @property
    def windows(self) -> list[Window]:
        """The windows to score: those of all options of all questions, in order."""
        return [window for question in self.questions for window in question.windows]

    def result(self, scores: Scores) -> TaskResult:
        """Return the result from the scores of ``windows``."""
        parts = scores.split(len(question.windows) for question in self.questions)
        samples = [
            _sample(question, part, self.rank, self.choose)
            for question, part in zip(self.questions, parts, strict=True)
        ]
        return TaskResult(self.name, self.score_of(samples), samples)


def generated_task(name: str, encoder: Encoder, config: EvalConfig, seq_len: int) -> RankedTask:
    """Return a generated task. Its score is the accuracy of the likeliest candidate, with Wilson's 95 % interval.

    ``gold_probability`` is the mean probability of the right candidate, with those of an item scaled to sum to 1; it
    changes before the accuracy does. Ties of likelihood are broken by the seed.
    """
    made = generator(name)
    assert made is not None, f"{name} is not generated"
    items = [made.make(index, config, lambda text: len(encoder.tokenizer.encode(text))) for index in range(config.n)]
    questions = [Question(item, item.prompt, differing_windows(encoder, item, seq_len), item.choices) for item in items]

    def choose(item: Item, ranks: NDArray[np.float64]) -> int:
        best = np.flatnonzero(ranks == ranks.min())
        return int(best[derive_key("tie", config.seed, item.index) % len(best)])

    def score_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
        size = {"shots": config.shots} if made.n_tokens is None else {"n_tokens": made.n_tokens}
        return {**accuracy(samples, made.chance), **size}

    return RankedTask(name, questions, partial(_ranks, "sum"), choose, score_of)


def file_task(
    name: str,
    task: TaskConfig,
    items: Sequence[Item],
    encoder: Encoder,
    config: EvalConfig,
    seq_len: int,
    *,
    chat: ChatFormat | None = None,
) -> RankedTask:
    """Return a task of a file; with ``chat`` its questions are in the model's chat format.

    Ties go to the first option: in ``v0.3`` that of the file, in ``fixed`` that of the item's hash.
    """
    mode = config.mode
    questions = []
    for prompt in make_prompts(task, items, mode=mode, limit=limit_of(task, config)):
        try:
            windows, texts, cut = option_windows(encoder, prompt, seq_len, mode, chat)
        except TooLong as error:
            raise TooLong(f"{task.file}:{prompt.item.line}: {error.message}", hint=error.hint) from error
        questions.append(Question(prompt.item, prompt.text, windows, texts, cut))
    if not config.cut_prompts:
        require_whole(sum(question.cut for question in questions), len(questions), seq_len)
    rank = partial(_ranks, task.rank_by if mode == "fixed" else "per_token")
    score_of = partial(_score_of, task, mode, items, questions)
    return RankedTask(name, questions, rank, lambda item, ranks: int(np.argmin(ranks)), score_of)


def _score_of(
    task: TaskConfig,
    mode: Mode,
    items: Sequence[Item],
    questions: Sequence[Question],
    samples: list[dict[str, Any]],
) -> dict[str, Any]:
    """``items``: those of all rows of the file, with their options in its order."""
    chance = chance_of(task, items)
    score = accuracy(samples, chance)
    if task.kind != "exact" and mode == "fixed":
        options, golds = [item.options for item in items], [item.gold for item in items]
        score["majority"] = majority(options, golds)
        # The order of options is that of a hash, so an answer of unequal options cannot always be the same. Of a file
        # with one right label alone no score is above its majority; smalti eval lint reports it.
        constant = score["majority"] if have_labels(options) and score["majority"] < 1 else 0.0
        score["baseline"] = max(chance, constant)
        score["permuted"] = permuted(
            [question.item.options for question in questions],
            [question.item.gold for question in questions],
            [sample["choice"] for sample in samples],
        )
        score["verdict"] = verdict(score["interval"] or (0.0, 1.0), max(chance, score["permuted"]))
    cut_frac = sum(question.cut for question in questions) / len(samples)
    return {**score, "shots": shots_of(task, items), "mode": mode, "cut_frac": cut_frac}


def chance_of(task: TaskConfig, items: Sequence[Item]) -> float:
    """Return the accuracy of a random answer: the task's own, or the mean of 1 / options."""
    if task.chance is not None:
        return task.chance
    if task.kind in ("exact", "generation"):
        return 0.0
    return sum(1 / len(item.options) for item in items) / len(items)


def _ranks(rank_by: str, scores: Scores, question: Question) -> NDArray[np.float64]:
    if rank_by == "per_token":
        return scores.nats / scores.n_tokens
    if rank_by == "per_byte":
        return scores.nats / np.array([max(1, len(text.encode())) for text in question.texts])
    return scores.nats


def _sample(
    question: Question, scores: Scores, rank: Rank, choose: Callable[[Item, NDArray[np.float64]], int]
) -> dict[str, Any]:
    item = question.item
    gold_text = question.texts[item.gold]
    sample: dict[str, Any] = {
        **item.labels(),
        "prompt": question.prompt,
        "choices": list(item.options),
        "log_likelihoods": [-float(value) for value in scores.nats],
        "n_tokens": scores.n_tokens.tolist(),
        "gold": item.gold,
    }
    if len(item.contexts) > 1:
        sample["continuation"] = item.choices[0]
    if len(question.windows) > 1:
        choice = choose(item, rank(scores, question))
        weights = np.exp(scores.nats.min() - scores.nats)
        sample |= {"choice": choice, "correct": choice == item.gold}
        sample["gold_probability"] = float(weights[item.gold] / weights.sum())
    else:
        sample["correct"] = bool(scores.greedy[0])
        sample["gold_probability"] = math.exp(-scores.nats[0])
    n_bytes = max(1, len(gold_text.encode()))
    sample["gold_bytes"] = n_bytes
    sample["bits_per_byte"] = float(scores.nats[item.gold]) / math.log(2) / n_bytes
    return sample
