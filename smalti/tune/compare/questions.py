"""Held-out conversations as questions, with or without solved examples in the prompt."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti.base import store
from smalti.base.errors import UserError
from smalti.base.hashing import sha256_file
from smalti.base.progress import Progress, no_progress
from smalti.base.rng import derive_key
from smalti.config.examples import ExamplesConfig
from smalti.config.task import Columns, TaskConfig
from smalti.data.documents.heldout import HELDOUT, TRAIN, split_of
from smalti.data.tokenizer.chat import Message, PlainChat
from smalti.evals.tasks.text_files import is_text_file, read_texts
from smalti.tune.chats.chat_tokenizer import in_loss
from smalti.tune.chats.examples import examples_of
from smalti.tune.chats.files import read_chats
from smalti.tune.chats.formats import Chat
from smalti.tune.chats.messages import ASSISTANT
from smalti.tune.chats.report import ExamplesReport
from smalti.tune.compare.bm25 import Bm25

LIKELIHOOD, ANSWERS = "likelihood", "answers"
"""Names of the two tasks: bits per byte of the right answers, and generated answers."""
SHORT_TOKENS = 64
"""Longest right answer that a generated one is compared with."""
_SPARE_TOKENS = 8
"""Tokens that a generated answer may have beyond the longest right one: one that continues is wrong."""


@dataclass(frozen=True)
class Question:
    """A conversation up to its last answer."""

    id: str
    prompt: tuple[Message, ...]
    answer: str

    @property
    def query(self) -> str:
        """The text that examples are retrieved by: the messages of the user."""
        return "\n".join(message["content"] for message in self.prompt if message["role"] == "user")

    def turns(self) -> list[Message]:
        """Return the conversation with its answer, without system messages: an example in another prompt."""
        turns = [message for message in self.prompt if message["role"] != "system"]
        return [*turns, {"role": ASSISTANT, "content": self.answer}]

    def after(self, before: "Sequence[Question | str]") -> tuple[Message, ...]:
        """Return the prompt with examples as earlier turns, after its system messages; passages of documents begin its
        last message."""
        passages = [each for each in before if isinstance(each, str)]
        if passages:
            last = {"role": "user", "content": "\n\n".join([*passages, self.prompt[-1]["content"]])}
            return (*self.prompt[:-1], last)
        turns = [turn for example in before if isinstance(example, Question) for turn in example.turns()]
        n = next((n for n, message in enumerate(self.prompt) if message["role"] != "system"), len(self.prompt))
        return (*self.prompt[:n], *turns, *self.prompt[n:])


@dataclass(frozen=True)
class Questions:
    """The examples of a recipe as questions."""

    heldout: list[Question]
    train: list[Question]
    left_out: int
    """Held-out conversations that are no question with an answer: with tools, without a last turn of the user."""


@dataclass(frozen=True)
class Asked:
    """The tasks of one way to ask the questions."""

    tasks: tuple[TaskConfig, ...]
    digest: str
    prompt_tokens: float
    """Mean tokens of a prompt."""
    examples: float
    """Mean number of examples in a prompt."""


def read_questions(
    config: ExamplesConfig, tokenizer: str, max_tokens: int, limit: int, progress: Progress = no_progress
) -> Questions:
    """Return the last question of each conversation, the held-out ones a sample of at most ``limit``.

    The splits are those of the tokenized examples; what was dropped there (duplicates, contaminated and too long rows)
    is not asked either. Raises UserError where no question is held out.
    """
    ids: dict[str, set[str]] = {TRAIN: set(), HELDOUT: set()}
    for split, example in examples_of(config, tokenizer, ExamplesReport(), max_tokens=max_tokens, progress=progress):
        ids[split].add(example.id)
    questions: dict[str, list[Question]] = {TRAIN: [], HELDOUT: []}
    left_out = 0
    for row in read_chats(config):
        if row.chat is None:
            continue
        split = split_of(row.chat.group, seed=config.seed, heldout_frac=config.heldout_frac)
        number, question = _question(row.id, row.chat, config)
        if row.id in ids[split] or f"{row.id}#{number}" in ids[split]:
            left_out += question is None and split == HELDOUT
            questions[split] += [] if question is None else [question]
    heldout = sorted(questions[HELDOUT], key=lambda question: derive_key("compare", question.id, question.query))
    if not heldout:
        raise UserError(
            f"no question is held out ({left_out} held-out rows are no conversations that end with an answer)",
            allowed="conversations of the user and the assistant, some of them held out",
            hint=f"tune.examples.heldout_frac=0.1 (it is {config.heldout_frac:g})",
        )
    return Questions(heldout[:limit], questions[TRAIN], left_out)


def _question(name: str, chat: Chat, config: ExamplesConfig) -> tuple[int, Question | None]:
    """Return the number of the last answer, and the question; None where it is not one of texts."""
    messages = chat.conversations[0]
    numbers = in_loss(messages, first=chat.first)
    if not numbers or chat.is_text or chat.tools or len(chat.conversations) > 1 or ASSISTANT not in config.roles:
        return 0, None
    prompt, answer = messages[: numbers[-1]], messages[numbers[-1]]
    texts = all(isinstance(message.get("content"), str) for message in (*prompt, answer))
    roles = [message["role"] for message in prompt]
    if not texts or not answer["content"].strip() or roles[-1:] != ["user"] or {*roles} - {"system", "user", ASSISTANT}:
        return numbers[-1], None
    plain = tuple({"role": message["role"], "content": message["content"]} for message in prompt)
    return numbers[-1], Question(name, plain, answer["content"].strip())


def fixed_examples(train: Sequence[Question], shots: int) -> Callable[[Question], Sequence[Question]]:
    """Return the choice of the same ``shots`` random examples for every question."""
    chosen = random.Random(derive_key("compare", "shots")).sample(train, min(shots, len(train)))
    return lambda question: chosen


def nearest_examples(train: Sequence[Question], shots: int) -> Callable[[Question], Sequence[Question]]:
    """Return the choice of the ``shots`` examples nearest to a question by BM25, the nearest last."""
    index = Bm25([example.query for example in train])
    return lambda question: [train[number] for number in reversed(index.nearest(question.query, shots))]


def nearest_passages(passages: Sequence[str], shots: int) -> Callable[[Question], Sequence[str]]:
    """Return the choice of the ``shots`` passages nearest to a question by BM25, the nearest last."""
    index = Bm25(passages)
    return lambda question: [passages[number] for number in reversed(index.nearest(question.query, shots))]


def read_passages(path: str) -> list[str]:
    """Return the paragraphs of a .txt, .md or .jsonl (field ``text``) file: texts between blank lines."""
    if not is_text_file(path):
        raise UserError(f"--documents {path} is no text", allowed=".txt, .md or .jsonl (field text)")
    texts = [text.decode() for text in read_texts(path)]
    passages = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not passages:
        raise UserError(f"--documents {path} holds no text", allowed="paragraphs, with blank lines between them")
    return list(dict.fromkeys(passages))


def longest_new(answer_tokens: Sequence[int]) -> int:
    """Return the tokens that a generated answer may have."""
    return max([n for n in answer_tokens if n <= SHORT_TOKENS], default=0) + _SPARE_TOKENS


def write_tasks(
    folder: Path,
    questions: Sequence[Question],
    examples_for: Callable[[Question], Sequence[Question | str]],
    *,
    n_tokens: Callable[[Sequence[Message]], int],
    answer_tokens: Sequence[int],
    seq_len: int,
) -> Asked:
    """Write the prompts as files of two tasks. Examples that do not fit ``seq_len`` are left out, the first ones first.

    ``n_tokens``: tokens of a prompt; ``answer_tokens``: those of each right answer.
    """
    n_new = longest_new(answer_tokens)
    rows: dict[str, list[str]] = {LIKELIHOOD: [], ANSWERS: []}
    n_prompt = n_examples = 0
    for question, n_answer in zip(questions, answer_tokens, strict=True):
        examples = list(examples_for(question))
        room = seq_len - max(n_answer, n_new)
        while (size := n_tokens(question.after(examples))) > room and examples:
            del examples[0]
        messages = [*question.after(examples), {"role": ASSISTANT, "content": question.answer}]
        line = json.dumps({"id": question.id, "messages": messages}, ensure_ascii=False) + "\n"
        rows[LIKELIHOOD].append(line)
        if n_answer <= SHORT_TOKENS:
            rows[ANSWERS].append(line)
        n_prompt, n_examples = n_prompt + size, n_examples + len(examples)
    files = {name: folder / f"{name}.jsonl" for name in rows if rows[name]}
    for name, path in files.items():
        store.write_text(path, "".join(rows[name]))
    columns = Columns(messages="messages", id="id")
    tasks = [TaskConfig(kind="exact", name=LIKELIHOOD, file=str(files[LIKELIHOOD]), columns=columns)]
    if ANSWERS in files:
        stop = PlainChat().stops  # a chat template has its end of turn
        generated = {"verbatim": True, "stop": stop, "max_new_tokens": n_new}
        tasks.append(
            TaskConfig(kind="generation", name=ANSWERS, file=str(files[ANSWERS]), columns=columns, **generated)
        )
    n = len(questions)
    return Asked(tuple(tasks), sha256_file(files[LIKELIHOOD]), n_prompt / n, n_examples / n)
