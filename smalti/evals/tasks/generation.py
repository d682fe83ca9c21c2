"""Tasks with generated answers: greedy, until a stop text, the end of the document or the longest answer."""

from collections.abc import Sequence

from smalti.config.eval import EvalConfig
from smalti.config.task import Mode, TaskConfig
from smalti.data.tokenizer.chat import ChatFormat
from smalti.evals.graders import answers
from smalti.evals.likelihood import Progress
from smalti.evals.results import TaskResult
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.items import Item
from smalti.evals.tasks.prompts import Prompt, make_prompts
from smalti.evals.tasks.windows import TooLong, chat_ids, cut_ids, head_ids, prompt_ids
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams

_SPARE_TOKENS = 10
"""Tokens that reasoning may have beyond the longest in the file."""


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
    mode = config.mode
    n_new = max_new_tokens(task, items, engine)
    if n_new >= seq_len:
        raise TooLong(
            f"an answer has up to {n_new} tokens, and the longest context is {seq_len}",
            hint="leave the task out, or evaluate with a longer seq_len",
        )
    prompts = make_prompts(task, items, mode=mode, limit=config.limit or task.limit)
    rows = [_ids(engine, prompt, seq_len - n_new, mode, chat) for prompt in prompts]
    task_stop = task.stop if chat is None else chat.stops
    stop = task_stop or (("\n",) if mode == "fixed" and not task.answer_delimiter and chat is None else ())
    completions = generate(engine, [ids for ids, _ in rows], SamplingParams(max_tokens=n_new, stop=stop))
    progress(1, 1)
    grade = answers.as_published if mode == "v0.3" else answers.exact
    samples = []
    for prompt, completion in zip(prompts, completions, strict=True):
        right = prompt.item.answers
        result = grade(
            completion.text, right, delimiter=task.answer_delimiter, stop=task_stop, normalize=task.normalize
        )
        samples.append(
            {
                **prompt.item.labels(),
                "prompt": prompt.text,
                "answer": completion.text,
                "parsed": result.parsed,
                "answers": list(right),
                "truncated": completion.finish_reason == "length",
                "correct": result.correct,
            }
        )
    score = accuracy(samples, task.chance or 0.0)
    score |= {
        "truncated_frac": sum(bool(sample["truncated"]) for sample in samples) / len(samples),
        "unparsed_frac": sum(sample["parsed"] is None for sample in samples) / len(samples),
        "max_new_tokens": n_new,
        "shots": task.shots,
        "mode": mode,
        "cut_frac": sum(is_cut for _, is_cut in rows) / len(rows),
    }
    return TaskResult(name, score, samples)


def _ids(engine: Engine, prompt: Prompt, room: int, mode: Mode, chat: ChatFormat | None) -> tuple[list[int], bool]:
    """Return the tokens of a prompt, at most ``room``, and whether it was cut."""
    if chat is not None:
        return chat_ids(engine, chat, prompt.text, room)
    ids = prompt_ids(engine, prompt, mode)
    return cut_ids(ids, room, keep_first=mode == "fixed"), len(ids) > room


def max_new_tokens(task: TaskConfig, items: Sequence[Item], engine: Engine) -> int:
    """Return the longest answer: the task's own, or the longest of the file with its reasoning, and 10 more."""
    if task.max_new_tokens is not None:
        return task.max_new_tokens
    texts = {
        answer if item.reasoning is None else item.reasoning + task.answer_delimiter + answer
        for item in items
        for answer in item.answers
    }
    return max(1, *(len(head_ids(engine, text)) for text in texts)) + (_SPARE_TOKENS if task.answer_delimiter else 0)
