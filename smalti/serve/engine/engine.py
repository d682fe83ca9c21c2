"""The generation engine: prompts in, answers out.

Promises: the answer to a prompt does not depend on what else is asked at the same time: prompts of equal length share a
group, never padding, and draws are keyed by (seed, position); greedy answers equal those of a full recomputation up to
the rounding of the logits. Generates from a plain ``Decoder`` in one process. Groups run one after the other; requests
that come while others run are not taken in yet.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Self

import torch

from smalti.base import store
from smalti.base.errors import UserError
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.sampling import SamplingParams, choose
from smalti.serve.engine.sequence import Completion, Sequence
from smalti.serve.folders import ModelFolder

_CONTEXT_TOKENS = 4
"""Tokens of the prompt that the text decoder sees first: some tokenizers drop a blank at the head of a text."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Engine:
    """A model and its tokenizer, ready to answer.

    Every prompt is preceded by ``begin_id`` (the tokenizer's end-of-document token where none is given: that is what
    stood before each document in training). An answer ends at one of ``end_ids``.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        begin_id: int | None = None,
        end_ids: frozenset[int] = frozenset(),
        name: str = "model",
        max_rows: int = 32,
    ) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}",
                hint="this is not the tokenizer that the model was trained with",
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.end_id: int = tokenizer.eod_id
        self.begin_id = self.end_id if begin_id is None else begin_id
        self.end_ids = end_ids | {self.end_id}
        self.limit_tokens: int = model.config.max_position_embeddings
        self.name = name
        self._max_rows = max_rows

    @classmethod
    def from_folder(cls, folder: str | Path, *, dtype: str = "fp32", device: str = "auto") -> Self:
        """Load a Hugging Face folder, ours or another Llama's or DBRX's; begin and end tokens come from its configs."""
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype} is not known", allowed=", ".join(DTYPES))
        model = load_folder(folder, DTYPES[dtype])
        found = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(folder)
        begin, ends = _special_ids(str(folder))
        place = found if device == "auto" else device
        return cls(model.to(place), tokenizer, begin_id=begin, end_ids=ends, name=ModelFolder(str(folder), None).name)

    def generate(
        self, prompts: Rows[str], params: SamplingParams | Rows[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer each prompt; ``params`` for all, or one for each; absent, greedy up to 128 tokens.

        Raises UserError for a prompt that leaves no room for an answer.
        """
        params = SamplingParams() if params is None else params
        own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(own) != len(prompts):
            raise UserError(f"{len(own)} sampling params for {len(prompts)} prompts", allowed="one, or one for each")
        sequences = [self._sequence(prompt, one) for prompt, one in zip(prompts, own, strict=True)]
        for group in _groups(sequences, self._max_rows):
            for _ in self._run(group):
                pass
        return [sequence.completion() for sequence in sequences]

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one prompt in pieces of whole characters; joined they are the text that ``generate`` returns."""
        sequence = self._sequence(prompt, params or SamplingParams())
        for pieces in self._run([sequence]):
            if pieces[0]:
                yield pieces[0]

    def _sequence(self, prompt: str, params: SamplingParams) -> Sequence:
        ids = [self.begin_id, *(int(token) for token in self.tokenizer.encode(prompt))]
        if len(ids) >= self.limit_tokens:
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model takes {self.limit_tokens}, answer included",
                allowed=f"at most {self.limit_tokens - 1} tokens",
                hint="shorten the prompt",
            )
        decoder = self.tokenizer.decode_stream()
        for token in ids[-_CONTEXT_TOKENS:]:
            decoder.push(token)
        return Sequence(prompt, ids, params, self.end_ids, self.limit_tokens, decoder)

    def _run(self, group: list[Sequence]) -> Iterator[list[str]]:
        """Generate a group of equal prompt lengths to its end; yields each step's piece of text of every sequence.

        A finished row leaves the cache at once, so the last sequences of a group do not pay for the others.
        """
        longest = max(sequence.params.max_tokens for sequence in group) + len(group[0].prompt_ids)
        runner = Runner(self.model, len(group), min(self.limit_tokens, longest))
        active = list(range(len(group)))
        logits_BV = runner.forward([sequence.prompt_ids for sequence in group])
        while True:
            rows = [group[index] for index in active]
            # An output head may be padded; ids without a text are never chosen.
            tokens = choose(
                logits_BV[:, : self.tokenizer.vocab_size], [row.params for row in rows], [row.position for row in rows]
            )
            pieces = [""] * len(group)
            for index, token in zip(active, tokens, strict=True):
                pieces[index] = group[index].append(token)
            yield pieces
            kept = [place for place, row in enumerate(rows) if row.finish_reason is None]
            if not kept:
                return
            if len(kept) < len(rows):
                runner.keep(kept)
                active = [active[place] for place in kept]
            logits_BV = runner.forward([[group[index].output_ids[-1]] for index in active])


def _groups(sequences: list[Sequence], max_rows: int) -> Iterator[list[Sequence]]:
    """Sequences of equal prompt length, at most ``max_rows`` at once."""
    by_length: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence.prompt_ids), []).append(sequence)
    for _, equal in sorted(by_length.items()):
        for start in range(0, len(equal), max_rows):
            yield equal[start : start + max_rows]


def _special_ids(folder: str) -> tuple[int | None, frozenset[int]]:
    """bos and eos ids as a folder's config.json and generation_config.json name them (eos may be a list there)."""
    begin: int | None = None
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = store.join(folder, name)
        values = store.read_json(path) if store.exists(path) else {}
        if values.get("bos_token_id") is not None:
            begin = int(values["bos_token_id"])
        eos = values.get("eos_token_id")
        ends |= {int(token) for token in (eos if isinstance(eos, list) else [] if eos is None else [eos])}
    return begin, frozenset(ends)
