"""Runs a comparison: asks every way the same questions, training first where a way needs it.

A way whose result is there is not repeated: ``WAY/way.json`` has the digest of all that it depends on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smalti.base import clock, store
from smalti.base.errors import UserError
from smalti.base.hashing import digest_json
from smalti.config.identity import identity
from smalti.config.run import RunConfig
from smalti.data.tokenizer.chat import Message, load_chat
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.serve.engine.engine import Engine
from smalti.train.origin import model_of
from smalti.tune.compare import evaluate
from smalti.tune.compare.evaluate import Model
from smalti.tune.compare.page import page
from smalti.tune.compare.questions import (
    Asked,
    Question,
    Questions,
    fixed_examples,
    longest_new,
    nearest_examples,
    nearest_passages,
    read_questions,
    write_tasks,
)
from smalti.tune.compare.result import compared
from smalti.tune.compare.ways import PROMPTED, Way, answer_flops, training_of

RESULT, PAGE = "compare.json", "compare.html"
_FORMAT = 1
_LONGEST_TOKENS = 2048
_FP32_BYTES = 4
"""Of each trained parameter, as ``smalti export`` writes it."""


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    recipe: str
    config: RunConfig
    """The recipe's run, without the changes of a way."""
    folder: Path
    trained: Mapping[Way, RunConfig]
    """The runs of the ways that train."""
    ways: Sequence[Way]
    shots: int
    limit: int
    passages: Sequence[str] = ()
    """Paragraphs of documents for ``retrieve``; empty: it retrieves training examples."""

    @cached_property
    def seq_len(self) -> int:
        """The longest context of every way."""
        assert self.config.init_from is not None
        lengths = [config.model.max_position_embeddings for config in (self.config, *self.trained.values())]
        return min(*lengths, model_of(self.config.init_from).max_position_embeddings, _LONGEST_TOKENS)

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer, with the chat template of the tuned models."""
        assert self.config.data.tokenizer is not None
        return self.config.data.tokenizer

    def questions(self, progress: Callable[..., None]) -> Questions:
        """Read the held-out questions and the training examples."""
        tune = self.config.tune
        assert tune is not None
        questions = read_questions(tune.examples, self.tokenizer, self.config.data.seq_len, self.limit, progress)
        if "retrieve" in self.ways and not (questions.train or self.passages):
            raise UserError("there are no training examples to retrieve", hint="--ways prompt,lora,full")
        return questions


def run(plan: Plan, train: Callable[[Way], None], progress: Callable[..., None]) -> dict[str, Any]:
    """Return the comparison, which is written to ``compare.json`` and ``compare.html``.

    ``train`` runs the training of a way to its end, and raises where it does not come to it.
    """
    base = evaluate.base_model(plan.config, plan.folder)
    questions = plan.questions(progress)
    asked = _Asker(plan, base, questions)
    entries: dict[str, dict[str, Any]] = {}
    for way in plan.ways:
        entries[way] = _entry(plan, way, base, asked, train, progress)
    result = {
        "recipe": plan.recipe,
        "model": plan.config.init_from,
        "time": clock.utc_text(),
        "questions": len(asked.questions),
        "left_out": questions.left_out + len(questions.heldout) - len(asked.questions),
        "shots": plan.shots,
        "seq_len": plan.seq_len,
        **compared(entries),
    }
    store.write_json(plan.folder / RESULT, result)
    store.write_text(plan.folder / PAGE, page(result))
    return result


def _entry(
    plan: Plan, way: Way, base: Model, asker: "_Asker", train: Callable[[Way], None], progress: Callable[..., None]
) -> dict[str, Any]:
    """Return folder of results and cost of a way, from an earlier command where it has finished it."""
    folder, config = plan.folder / way, plan.trained.get(way)
    asked = asker.asked(way)
    heldout = evaluate.heldout_of(plan.config)
    settings = identity(config) if config is not None else plan.shots
    key = digest_json([_FORMAT, way, settings, base.stamp, asked.digest, heldout, plan.seq_len])
    path = folder / "way.json"
    if path.is_file() and (stored := store.read_json(path))["key"] == key and Path(stored["folder"]).is_dir():
        return {name: stored[name] for name in ("folder", "cost")}
    model = base
    if config is not None:
        train(way)
        model = evaluate.tuned_model(folder, config)
    engine = Engine.from_folder(model.folder)
    report = evaluate.evaluate(engine, model, asked, heldout, plan.seq_len, folder, progress)
    cost = _cost(way, folder, config, model, asked, asker, report["folder"])
    entry = {"folder": report["folder"], "cost": {**cost, "device": str(next(engine.model.parameters()).device)}}
    store.write_json(path, {"key": key, **entry})
    return entry


def _cost(
    way: Way, folder: Path, config: RunConfig | None, model: Model, asked: Asked, asker: "_Asker", results: str
) -> dict[str, Any]:
    training = None if config is None else training_of(config)
    prompt, answer = asked.prompt_tokens, sum(asker.answer_tokens) / len(asker.answer_tokens)
    return {
        "train_tokens": training.tokens if training else 0,
        "train_flops": training.flops if training else 0.0,
        "train_s": evaluate.trained_s(folder) if training else 0.0,
        "trained_params": training.params if training else 0,
        "kept_bytes": asker.kept_bytes(way) if training is None else _FP32_BYTES * training.params,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "examples": asked.examples,
        "answer_flops": answer_flops(model_of(model.folder), prompt, answer),
        "answer_s": evaluate.seconds_of_answer(evaluate.samples_of(results)[0]),
    }


class _Asker:
    """Writes the questions as each way asks them; those that do not fit the context of one way are left out of all."""

    def __init__(self, plan: Plan, base: Model, questions: Questions) -> None:
        self._plan, self._train = plan, questions.train
        self._tokens = _Tokens(base, plan.tokenizer)
        sizes = [len(self._tokens.tokenizer.encode(question.answer)) for question in questions.heldout]
        room = plan.seq_len - longest_new(sizes)
        pairs = [
            (question, size)
            for question, size in zip(questions.heldout, sizes, strict=True)
            if max(self._tokens.size(question.prompt, tuned=tuned) for tuned in (False, True))
            <= min(room, plan.seq_len - size)
        ]
        if not pairs:
            raise UserError(
                f"no held-out question fits a context of {plan.seq_len} tokens with its answer",
                hint="a model with a longer context, or shorter examples",
            )
        self.questions: list[Question] = [question for question, _ in pairs]
        self.answer_tokens: list[int] = [size for _, size in pairs]

    def asked(self, way: Way) -> Asked:
        """Write the tasks of a way, the examples of ``prompt`` and ``retrieve`` in the prompts."""
        shots = self._plan.shots if way in PROMPTED else 0
        choose: Callable[[Question], Sequence[Question | str]] = fixed_examples(self._train, shots)
        if way == "retrieve" and self._plan.passages:
            choose = nearest_passages(self._plan.passages, shots)
        elif way == "retrieve":
            choose = nearest_examples(self._train, shots)
        is_prompted = way in PROMPTED
        return write_tasks(
            self._plan.folder / "questions" / (way if is_prompted else "tuned"),
            self.questions,
            choose,
            n_tokens=lambda messages: self._tokens.size(messages, tuned=not is_prompted),
            answer_tokens=self.answer_tokens,
            seq_len=self._plan.seq_len,
        )

    def kept_bytes(self, way: Way) -> int:
        """Return the bytes of the examples or documents that a prompted way needs at serving."""
        if way != "retrieve":
            return 0
        if self._plan.passages:
            return sum(len(passage.encode()) for passage in self._plan.passages)
        return sum(len(turn["content"].encode()) for example in self._train for turn in example.turns())


class _Tokens:
    """Counts the tokens of prompts in the format of the base model, and in that of the tuned ones."""

    def __init__(self, base: Model, tokenizer: str) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self._formats = {False: base.chat, True: load_chat(tokenizer)}

    def size(self, messages: Sequence[Message], *, tuned: bool) -> int:
        """Return the tokens of a prompt."""
        return len(self._formats[tuned].prompt_ids(messages, self.tokenizer, self.tokenizer.eod_id))
