"""Tasks with generated answers: greedy, until a stop text, the end of the document or the longest answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smalti.config.eval import EvalConfig
from smalti.config.task import Mode, TaskConfig
from smalti.data.tokenizer.chat import ChatFormat
from smalti.evals.graders import answers
from smalti.evals.likelihood import Progress
from smalti.evals.results import TaskResult
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.items import Item
from smalti.evals.tasks.prompts import Prompt, limit_of, make_prompts, shots_of
from smalti.evals.tasks.windows import (
    Encoder,
    TooLong,
    chat_ids,
    conversation_ids,
    cut_ids,
    head_ids,
    prompt_ids,
    require_whole,
)
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams

_SPARE_TOKENS = 10
"""Tokens that an answer may have beyond the longest in the file; none in ``v0.3`` without reasoning."""


@dataclass(frozen=True)
class Completed:
    """A prompt, what the model answered, and whether the prompt was cut to fit."""

    prompt: Prompt
    text: str
    truncated: bool
    cut: bool

    def sample(self) -> dict[str, Any]:
        """Return the fields that every generated answer has in a sample."""
        labels = self.prompt.item.labels()
        return {**labels, "prompt": self.prompt.text, "answer": self.text, "truncated": self.truncated}


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
    """Generate an answer to each prompt and grade it; ``truncated_frac`` is the share of answers without an end.

    With ``chat`` the prompt is the user's message, and an answer ends at the end of the turn: ``stop`` is for models
    that continue the text.
    """
    n_new = max_new_tokens(task, items, engine, config.mode)
    task_stop = task.stop if chat is None else chat.stops
    ends_with_line = config.mode == "fixed" and not task.answer_delimiter and chat is None
    stop = task_stop or (("\n",) if ends_with_line else ())
    completed = complete(task, items, engine, config, seq_len, chat, n_new=n_new, stop=stop)
    progress(1, 1)
    grade = partial(
        answers.as_published if config.mode == "v0.3" else answers.exact,
        delimiter=task.answer_delimiter,
        stop=task_stop,
        normalize=task.normalize,
    )
    samples = []
    for answer in completed:
        right = answer.prompt.item.answers
        result = answers.verbatim(answer.text, right) if task.verbatim else grade(answer.text, right)
        samples.append({**answer.sample(), "parsed": result.parsed, "answers": list(right), "correct": result.correct})
    score = accuracy(samples, task.chance or 0.0) | shares(completed)
    score["unparsed_frac"] = sum(sample["parsed"] is None for sample in samples) / len(samples)
    return TaskResult(
        name, {**score, "max_new_tokens": n_new, "shots": shots_of(task, items), "mode": config.mode}, samples
    )


def complete(
    task: TaskConfig,
    items: Sequence[Item],
    engine: Engine,
    config: EvalConfig,
    seq_len: int,
    chat: ChatFormat | None,
    *,
    n_new: int,
    stop: tuple[str, ...],
) -> list[Completed]:
    """Generate an answer of at most ``n_new`` tokens to the prompt of each item."""
    rows = prompt_rows(task, items, engine, config, seq_len, chat, n_new=n_new)
    answered = generate(engine, [ids for _, ids, _ in rows], SamplingParams(max_tokens=n_new, stop=stop))
    return [
        Completed(prompt, answer.text, answer.finish_reason == "length", is_cut)
        for answer, (prompt, _, is_cut) in zip(answered, rows, strict=True)
    ]


def prompt_rows(
    task: TaskConfig,
    items: Sequence[Item],
    encoder: Encoder,
    config: EvalConfig,
    seq_len: int,
    chat: ChatFormat | None,
    *,
    n_new: int,
) -> list[tuple[Prompt, list[int], bool]]:
    """Return each prompt with its tokens, and whether it was cut to leave room for an answer of ``n_new`` tokens.

    Raises TooLong where there is no room, and with ``cut_prompts=false`` where a prompt was cut.
    """
    room = seq_len - n_new
    if room < 1:
        raise TooLong(
            f"an answer has up to {n_new} tokens, and the longest context is {seq_len}",
            hint="leave the task out, or evaluate with a longer seq_len",
        )
    prompts = make_prompts(task, items, mode=config.mode, limit=limit_of(task, config))
    rows = [(prompt, *_ids(encoder, prompt, room, config.mode, chat)) for prompt in prompts]
    if not config.cut_prompts:
        require_whole(sum(is_cut for *_, is_cut in rows), len(rows), seq_len, n_new)
    return rows


def shares(completed: Sequence[Completed]) -> dict[str, float]:
    """Return the shares of answers without an end, and of prompts that were cut."""
    return {
        "truncated_frac": sum(answer.truncated for answer in completed) / len(completed),
        "cut_frac": sum(answer.cut for answer in completed) / len(completed),
    }


def _ids(encoder: Encoder, prompt: Prompt, room: int, mode: Mode, chat: ChatFormat | None) -> tuple[list[int], bool]:
    """Return the tokens of a prompt, at most ``room``, and whether it was cut."""
    if chat is not None and prompt.item.messages:
        return conversation_ids(encoder, chat, prompt.item, room), False
    if chat is not None:
        return chat_ids(encoder, chat, prompt.text, room)
    ids = prompt_ids(encoder, prompt, mode)
    return cut_ids(ids, room, keep_first=mode == "fixed"), len(ids) > room


def max_new_tokens(task: TaskConfig, items: Sequence[Item], encoder: Encoder, mode: Mode) -> int:
    """Return the longest answer: the task's own, or the longest of the file with its reasoning, and some."""
    if task.max_new_tokens is not None:
        return task.max_new_tokens
    texts = {
        answer if item.reasoning is None else item.reasoning + task.answer_delimiter + answer
        for item in items
        for answer in item.answers
    }
    return max(1, *(len(head_ids(encoder, text)) for text in texts)) + (
        _SPARE_TOKENS if task.answer_delimiter or mode == "fixed" else 0
    )
