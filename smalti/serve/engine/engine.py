"""The generation engine: requests in, pieces of answers out.

Promises: requests of any length join and leave between two steps; the answer to a request does not depend on what else
runs at the same time (``runner`` says to the bit where that holds), and draws are keyed by (seed, position); greedy
answers equal those of a full recomputation up to the rounding of the logits; nothing overtakes a request that waits.
Generates from a plain ``Decoder`` in one process.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from smalti.base import log
from smalti.base.errors import UserError
from smalti.data.tokenizer.encode import StreamDecoder, Tokenizer, load_tokenizer
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.sampling import NotFinite, SamplingParams, check_finite, choose
from smalti.serve.engine.scheduler import Limits, QueueFull, Scheduler
from smalti.serve.engine.scores import Vocabulary, score
from smalti.serve.engine.sequence import Completion, FinishReason, OnPiece, Piece, Sequence, TokenScore
from smalti.serve.folders import ModelFolder

_CONTEXT_TOKENS = 4
"""Tokens of the prompt that the text decoder sees first: some tokenizers drop a blank at the head of a text."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Counts:
    """The engine's numbers at one moment."""

    running: int
    """Requests that have a row: their prompt is being read, or they generate."""
    waiting: int
    kv_used_frac: float
    """Share of the cache that is set aside for the requests that run."""
    prompt_tokens_total: int
    """Tokens of prompts that have been read."""
    generated_tokens_total: int


class Engine:
    """A model and its tokenizer, ready to answer.

    A prompt given as text is preceded by ``begin_id`` (the tokenizer's end-of-document token where none is given: that
    is what stood before each document in training); one given as ids is taken as it is. An answer ends at one of
    ``end_ids``. ``submit`` and ``abort`` may be called from any thread, all else from one.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        begin_id: int | None = None,
        end_ids: frozenset[int] = frozenset(),
        name: str = "model",
        limits: Limits | None = None,
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
        self.limits = limits or Limits()
        self._vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.unused_ids)
        self._runner = Runner(self.model, step_rows=self.limits.step_rows)
        cache_tokens = self.limits.cache_bytes // self._runner.token_bytes
        self._scheduler = Scheduler(self.limits, cache_tokens, self.limit_tokens)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Sequence] = {}
        self._arrived: deque[Sequence] = deque()
        self._aborted: deque[int] = deque()
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, dtype: str = "fp32", device: str = "auto", limits: Limits | None = None
    ) -> Self:
        """Load a Hugging Face folder, ours or another Llama's or DBRX's; begin and end tokens come from its configs."""
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype} is not known", allowed=", ".join(DTYPES))
        model = load_folder(folder, DTYPES[dtype])
        found = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(folder)
        files = ModelFolder(str(folder), None)
        begin, ends = files.special_ids()
        place = found if device == "auto" else device
        return cls(model.to(place), tokenizer, begin_id=begin, end_ids=ends, name=files.name, limits=limits)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt: str | Rows[int], params: SamplingParams, on_piece: OnPiece) -> int:
        """Take a request in; returns its number. ``on_piece`` is called by ``step``, the last time with an end.

        Raises UserError for a prompt that does not fit and QueueFull when too many requests are open.
        """
        sequence = self._sequence(prompt, params, on_piece)
        with self._lock:
            if len(self._open) >= self.limits.max_rows + self.limits.max_waiting:
                raise QueueFull(
                    f"{len(self._open)} requests run and wait already",
                    allowed=f"{self.limits.max_rows} that run and {self.limits.max_waiting} that wait",
                    hint="send it again later",
                )
            self._open[sequence.request] = sequence
            self._arrived.append(sequence)
        return sequence.request

    def abort(self, request: int) -> None:
        """End a request at the begin of the next step, with a last piece. Nothing for one that has ended."""
        self._aborted.append(request)

    def end_all(self, error: BaseException | None = None) -> None:
        """End every open request at once: with ``error``, or as aborted. Not while another thread is in ``step``."""
        with self._lock:
            sequences = list(self._open.values())
        for sequence in sequences:
            self._end(sequence, "abort" if error is None else "error", error)

    @property
    def idle(self) -> bool:
        """True when no request is open."""
        return not self._open

    def counts(self) -> Counts:
        """The engine's numbers now; may be called from any thread."""
        running = len(self._scheduler.reading) + len(self._scheduler.running)
        return Counts(
            running,
            max(0, len(self._open) - running),
            self._scheduler.reserved_tokens / self._scheduler.cache_tokens,
            self._prompt_tokens,
            self._generated_tokens,
        )

    def step(self) -> bool:
        """One turn: let requests in, read prompts within the budget, one token for all that generate.

        False when there was nothing to do. An error of one request ends that request; any other is raised, and then
        the engine must not be stepped again.
        """
        self._take_in()
        if not self._open:
            return False
        self._scheduler.admit()
        for sequence, end in self._scheduler.prompts():
            self._read(sequence, end)
        if self._scheduler.running:
            self._decode()
        return True

    # ---- whole answers -----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Rows[str | Rows[int]], params: SamplingParams | Rows[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer each prompt; ``params`` for all, or one for each; absent, greedy up to 128 tokens.

        Steps the engine itself, so not while an ``EngineLoop`` does. Raises UserError for a prompt that leaves no room
        for an answer, before any work.
        """
        params = SamplingParams() if params is None else params
        own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(own) != len(prompts):
            raise UserError(f"{len(own)} sampling params for {len(prompts)} prompts", allowed="one, or one for each")
        answers = [
            _Answer(prompt, self._sequence(prompt, one, pieces.append), pieces)
            for prompt, one, pieces in zip(prompts, own, [deque[Piece]() for _ in prompts], strict=True)
        ]
        ahead = deque(answers)
        try:
            while not all(answer.ended for answer in answers):
                while ahead and len(self._open) < self.limits.max_rows:
                    self._enter(ahead.popleft().sequence)
                self.step()
        finally:
            self._drop([answer.sequence for answer in answers])
        return [answer.completion(self.tokenizer) for answer in answers]

    def stream(self, prompt: str | Rows[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one prompt in pieces of whole characters; joined they are the text that ``generate`` returns.

        Steps the engine itself, as ``generate`` does.
        """
        pieces: deque[Piece] = deque()
        sequence = self._sequence(prompt, params or SamplingParams(), pieces.append)
        self._enter(sequence)
        try:
            while True:
                while not pieces:
                    self.step()
                piece = pieces.popleft()
                if piece.error is not None:
                    raise piece.error
                if piece.text:
                    yield piece.text
                if piece.finish_reason is not None:
                    return
        finally:
            self._drop([sequence])

    # ---- one turn ----------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        with self._lock:
            while self._arrived:
                self._scheduler.add(self._arrived.popleft())
        while self._aborted:
            sequence = self._open.get(self._aborted.popleft())
            if sequence is not None:
                self._end(sequence, "abort")

    def _read(self, sequence: Sequence, end: int) -> None:
        """Read the prompt up to ``end``; the first token of the answer where that is all of it."""
        params, ids, begin = sequence.params, sequence.prompt_ids, sequence.cached_tokens
        scored = params.prompt_logprobs is not None
        targets, n_top = ids[begin + 1 : end + 1] if scored else (), params.prompt_logprobs or 0
        try:
            logits_V, scores = self._runner.read(
                sequence.request, ids[begin:end], len(ids), targets, n_top, self._vocabulary,
                most_tokens=sequence.most_tokens,
            )  # fmt: skip
        except NotFinite as error:
            self._end(sequence, "error", error)
            return
        if scored and begin == 0:
            sequence.prompt_scores.append(TokenScore(ids[0], None))
        sequence.prompt_scores += scores
        sequence.cached_tokens = end
        self._prompt_tokens += end - begin
        if end < len(ids):
            return
        if params.max_tokens == 0:
            self._end(sequence, "length")
            return
        self._append([sequence], logits_V[None])
        if sequence.finish_reason is None:
            self._runner.start(sequence.request)
            self._scheduler.start(sequence)

    def _decode(self) -> None:
        last = {sequence.request: sequence.output_ids[-1] for sequence in self._scheduler.running}
        requests, logits_BV = self._runner.decode(last)
        self._append([self._open[request] for request in requests], logits_BV)

    def _append(self, rows: list[Sequence], logits_BV: Tensor) -> None:
        """Choose the next token of each row and hand it out."""
        tokens = self._choose(rows, logits_BV)
        self._generated_tokens += sum(token is not None for token in tokens)
        for row, (sequence, token) in enumerate(zip(rows, tokens, strict=True)):
            if token is None:
                continue
            made = TokenScore(token, None)
            if sequence.params.logprobs is not None:
                made = score(logits_BV[row : row + 1], [token], sequence.params.logprobs, self._vocabulary)[0]
            text = sequence.append(token)
            if sequence.finish_reason is not None:
                self._forget(sequence)
            self._give(sequence, Piece(text, (made,), sequence.take_prompt_scores(), sequence.finish_reason))

    def _choose(self, rows: list[Sequence], logits_BV: Tensor) -> list[int | None]:
        try:
            check_finite(logits_BV)
            choosable_BV = self._vocabulary.of(logits_BV)
            return list(choose(choosable_BV, [row.params for row in rows], [row.position for row in rows]))
        except NotFinite as error:
            if len(rows) == 1:
                self._end(rows[0], "error", error)
                return [None]
        return [self._choose([row], logits_BV[place : place + 1])[0] for place, row in enumerate(rows)]

    # ---- begin and end of a request ----------------------------------------------------------------------------------

    def _sequence(self, prompt: str | Rows[int], params: SamplingParams, on_piece: OnPiece) -> Sequence:
        if isinstance(prompt, str):
            ids = [self.begin_id, *(int(token) for token in self.tokenizer.encode(prompt))]
        else:
            ids = [int(token) for token in prompt]
            self._check_ids(ids)
        longest = self.limit_tokens - (params.max_tokens > 0)
        if len(ids) > longest:
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model takes {self.limit_tokens}, answer included",
                allowed=f"at most {longest} tokens",
                hint="shorten the prompt",
            )
        decoder = self.decoder_after(ids)
        return Sequence(next(self._numbers), ids, params, self.end_ids, self.limit_tokens, decoder, on_piece)

    def decoder_after(self, prompt_ids: Rows[int]) -> StreamDecoder:
        """What decodes an answer to this prompt: it may begin inside a character."""
        decoder = self.tokenizer.decode_stream()
        for token in prompt_ids[-_CONTEXT_TOKENS:]:
            decoder.push(token)
        return decoder

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise UserError("the prompt has no token", allowed="one or more ids, or a text")
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size or token in self.tokenizer.unused_ids:
                raise UserError(
                    f"the id {token} is not in the vocabulary", allowed=f"0 to {self.tokenizer.vocab_size - 1}"
                )

    def _enter(self, sequence: Sequence) -> None:
        with self._lock:
            self._open[sequence.request] = sequence
            self._arrived.append(sequence)

    def _forget(self, sequence: Sequence) -> bool:
        """Give back all that a request holds; False when it had ended before."""
        with self._lock:
            if self._open.pop(sequence.request, None) is None:
                return False
            if sequence in self._arrived:
                self._arrived.remove(sequence)
                return True
        self._scheduler.remove(sequence)
        self._runner.free(sequence.request)
        return True

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        if self._forget(sequence):
            sequence.finish_reason = reason
            self._give(sequence, Piece("", (), sequence.take_prompt_scores(), reason, error))

    def _give(self, sequence: Sequence, piece: Piece) -> None:
        try:
            sequence.on_piece(piece)
        except Exception:
            # Whoever listened is gone or broken; that is no reason to stop the others.
            log.get("serve").exception("request %d: its listener failed, the request ends", sequence.request)
            sequence.finish_reason = "error"
            self._forget(sequence)

    def _drop(self, sequences: list[Sequence]) -> None:
        """End those of our own requests that are still open, without a word."""
        for sequence in sequences:
            if sequence.request in self._open:
                self._forget(sequence)


@dataclass
class _Answer:
    """Collects the pieces of one request."""

    prompt: str | Rows[int]
    sequence: Sequence
    pieces: deque[Piece]

    @property
    def ended(self) -> bool:
        """True after the last piece; raises what ended the request, if that was an error."""
        if not self.pieces or self.pieces[-1].finish_reason is None:
            return False
        if self.pieces[-1].error is not None:
            raise self.pieces[-1].error
        return True

    def completion(self, tokenizer: Tokenizer) -> Completion:
        """The pieces joined."""
        sequence, tokens = self.sequence, [token for piece in self.pieces for token in piece.tokens]
        assert sequence.finish_reason is not None
        return Completion(
            self.prompt if isinstance(self.prompt, str) else tokenizer.decode(sequence.prompt_ids),
            "".join(piece.text for piece in self.pieces),
            tuple(token.id for token in tokens),
            sequence.finish_reason,
            len(sequence.prompt_ids),
            tuple(tokens) if sequence.params.logprobs is not None else (),
            tuple(token for piece in self.pieces for token in piece.prompt),
        )
