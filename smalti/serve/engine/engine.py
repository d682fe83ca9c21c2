"""The generation engine: continuous batching over one ``Decoder`` in one process.

Requests of any length join and leave between two steps, first come, first served. An answer is independent of the batch
(``runner`` says where that holds to the bit), and draws are keyed by (seed, position). Greedy answers equal those of a
full recomputation up to the rounding of the logits. ``offline`` answers a list of prompts without a server.
"""

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from smalti.base import log
from smalti.base.errors import UserError
from smalti.data.tokenizer.encode import StreamDecoder, Tokenizer, load_tokenizer
from smalti.model.adapters import several
from smalti.model.adapters.adapter import Adapter
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES
from smalti.model.huggingface import load_folder
from smalti.serve.adapters import load as load_adapters
from smalti.serve.adapters import load_end_ids
from smalti.serve.engine.request import FinishReason, OnOutput, Request, RequestOutput, TokenScore
from smalti.serve.engine.runner import Runner
from smalti.serve.engine.sampling import NotFinite, SamplingParams, check_finite, sample
from smalti.serve.engine.scheduler import Limits, QueueFull, Scheduler
from smalti.serve.engine.scores import SampledIds, score
from smalti.serve.folders import ModelFolder

_STEP_ROWS = 16
"""Rows to a multiple of which a decode step of a dense model is padded by default; ``Runner`` says why."""
_CONTEXT_TOKENS = 4
"""Last tokens of the prompt that the text decoder sees first: some tokenizers drop a space at the start of a text."""


@dataclass(frozen=True)
class Counts:
    """The engine's load and totals at one moment."""

    running: int
    """Requests that have a row: their prompt is being prefilled, or they generate."""
    waiting: int
    kv_used_frac: float
    """Fraction of the cache that is reserved for the requests that run."""
    prompt_tokens_total: int
    """Prompt tokens prefilled."""
    generated_tokens_total: int


class Engine:
    """A model, its tokenizer and the requests that are open.

    A prompt given as text is preceded by ``begin_id`` (default: the tokenizer's end-of-document token, which preceded
    each document in training); one given as ids is taken as it is. An answer ends at one of ``end_ids``. ``submit``,
    ``abort`` and ``counts`` may be called from any thread, all other methods from one.
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
        adapters: Mapping[str, Adapter] | None = None,
        adapter_end_ids: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        """``adapter_end_ids``: name of an adapter -> tokens at which its answers end, besides ``end_ids``."""
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}",
                hint="this is not the tokenizer that the model was trained with",
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.end_id: int = tokenizer.eod_id
        self.begin_id = self.end_id if begin_id is None else begin_id
        self._end_ids = end_ids | {self.end_id}
        self._adapter_end_ids = dict(adapter_end_ids or {})
        self.limit_tokens: int = model.config.max_position_embeddings
        self.name = name
        self.limits = limits or Limits()
        self._sampled_ids = SampledIds(tokenizer.vocab_size, tokenizer.unused_ids)
        step_rows = self.limits.step_rows or (1 if model.config.moe else _STEP_ROWS)
        self.adapters = list(adapters or {})
        rows = several.add(self.model, list(adapters.values())) if adapters else None
        self._runner = Runner(self.model, self._sampled_ids, step_rows=step_rows, adapter_rows=rows)
        cache_tokens = self.limits.cache_bytes // self._runner.token_bytes
        self._scheduler = Scheduler(self.limits, cache_tokens, self.limit_tokens)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Request] = {}
        self._submitted: deque[Request] = deque()
        self._aborted: deque[int] = deque()
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: str = "fp32",
        device: str = "auto",
        limits: Limits | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> Self:
        """Load a Hugging Face folder, from Smalti or elsewhere; begin and end tokens come from its configs.

        adapters: name -> folder in PEFT's format; ``submit`` chooses one by its name.
        """
        if dtype not in DTYPES:
            raise UserError(f"dtype={dtype} is not known", allowed=", ".join(DTYPES))
        model = load_folder(folder, DTYPES[dtype])
        loaded = load_adapters(adapters or {}, folder, model.config)
        if model.config.num_labels:
            raise UserError(
                f"{folder} is a reward model, which generates no text",
                allowed="a language model",
                hint="the model that it was trained from",
            )
        tokenizer = load_tokenizer(folder)
        files = ModelFolder(str(folder), None)
        begin_id, end_ids = files.special_ids()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(
            model.to(device),
            tokenizer,
            begin_id=begin_id,
            end_ids=end_ids,
            name=files.name,
            limits=limits,
            adapters=loaded,
            adapter_end_ids=load_end_ids(adapters or {}, tokenizer),
        )

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams, on_output: OnOutput, adapter: str | None = None
    ) -> int:
        """Submit a request; returns its number. ``step`` calls ``on_output``, the last time with a finish reason.

        Raises UserError for a prompt that does not fit and QueueFull when too many requests are open.
        """
        request = self.prepare(prompt, params, on_output, adapter)
        with self._lock:
            if len(self._open) >= self.limits.max_rows + self.limits.max_waiting:
                raise QueueFull(
                    f"{len(self._open)} requests are running or waiting",
                    allowed=f"{self.limits.max_rows} running and {self.limits.max_waiting} waiting",
                    hint="send it again later",
                )
            self._enqueue(request)
        return request.request_id

    def prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, on_output: OnOutput, adapter: str | None = None
    ) -> Request:
        """Make a request without queueing it. Raises UserError for a prompt that does not fit, or another adapter."""
        if adapter is not None and adapter not in self.adapters:
            raise UserError(f"there is no adapter '{adapter}'", allowed=", ".join(self.adapters) or "none")
        ids = self._prompt_ids(prompt)
        longest = self.limit_tokens - (params.max_tokens > 0)
        if len(ids) > longest:
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model takes {self.limit_tokens}, answer included",
                allowed=f"at most {longest} tokens",
                hint="shorten the prompt",
            )
        return Request(
            next(self._ids),
            ids,
            params,
            self.end_ids(adapter),
            self.limit_tokens,
            self.decoder_after(ids),
            on_output,
            adapter=several.NONE if adapter is None else self.adapters.index(adapter),
        )

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue prepared requests, however many."""
        with self._lock:
            for request in requests:
                self._enqueue(request)

    def abort(self, request_id: int) -> None:
        """End a request at the start of the next step, with a last output. Does nothing for one that has ended."""
        self._aborted.append(request_id)

    def end(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a request now, with a last output. Does nothing for one that has ended."""
        if self._release(request):
            request.finish_reason = reason
            self._emit(request, RequestOutput("", (), request.take_prompt_scores(), reason, error))

    def end_all(self, error: BaseException | None = None) -> None:
        """End every open request now: with ``error``, or as aborted. Not while another thread is in ``step``."""
        with self._lock:
            requests = list(self._open.values())
        for request in requests:
            self.end(request, "abort" if error is None else "error", error)

    @property
    def idle(self) -> bool:
        """True when no request is open."""
        return not self._open

    def counts(self) -> Counts:
        """Return the engine's load and totals; may be called from any thread."""
        running = self._scheduler.n_active
        return Counts(
            running,
            max(0, len(self._open) - running),
            self._scheduler.reserved_tokens / self._scheduler.cache_tokens,
            self._prompt_tokens,
            self._generated_tokens,
        )

    def end_ids(self, adapter: str | None = None) -> frozenset[int]:
        """Return the tokens that end an answer of the base, or of an adapter."""
        return self._end_ids | self._adapter_end_ids.get(adapter or "", frozenset())

    def decoder_after(self, prompt_ids: Sequence[int]) -> StreamDecoder:
        """Return a decoder for the answer to this prompt, which may begin inside a character."""
        decoder = self.tokenizer.decode_stream()
        for token in prompt_ids[-_CONTEXT_TOKENS:]:
            decoder.push(token)
        return decoder

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit requests, prefill prompts within the step's budget, and generate one token for each running request.

        Returns False when there was nothing to do. An error of one request ends that request; any other is raised, and
        then the engine must not be stepped again.
        """
        self._update_queue()
        if not self._open:
            return False
        self._scheduler.admit()
        for request, end in self._scheduler.prefills():
            self._prefill(request, end)
        if self._scheduler.running:
            self._decode()
        return True

    def _update_queue(self) -> None:
        """Pass new requests to the scheduler and end aborted ones."""
        with self._lock:
            while self._submitted:
                self._scheduler.add(self._submitted.popleft())
        while self._aborted:
            request = self._open.get(self._aborted.popleft())
            if request is not None:
                self.end(request, "abort")

    def _prefill(self, request: Request, end: int) -> None:
        """Prefill the prompt up to ``end``; generates the first token where that completes it."""
        params = request.params
        ids = request.prompt_ids
        begin = request.cached_tokens
        scored = params.prompt_logprobs is not None
        try:
            logits_V, scores = self._runner.prefill(
                request.request_id,
                ids[begin:end],
                len(ids),
                targets=ids[begin + 1 : end + 1] if scored else (),
                n_top=params.prompt_logprobs or 0,
                max_cached_tokens=request.max_cached_tokens,
                adapter=request.adapter,
            )
        except NotFinite as error:
            self.end(request, "error", error)
            return
        if scored and begin == 0:
            request.prompt_scores.append(TokenScore(ids[0], None))
        request.prompt_scores += scores
        request.cached_tokens = end
        self._prompt_tokens += end - begin
        if end < len(ids):
            return
        if params.max_tokens == 0:
            self.end(request, "length")
            return
        self._append([request], logits_V[None])
        if request.finish_reason is None:
            self._runner.start(request.request_id)
            self._scheduler.start(request)

    def _decode(self) -> None:
        """Generate the next token of every running request in one forward pass."""
        last_ids = {request.request_id: request.output_ids[-1] for request in self._scheduler.running}
        request_ids, logits_BV = self._runner.decode(last_ids)
        self._append([self._open[request_id] for request_id in request_ids], logits_BV)

    def _append(self, requests: list[Request], logits_BV: Tensor) -> None:
        """Sample the next token of each request and emit it."""
        tokens = self._sample(requests, logits_BV)
        self._generated_tokens += sum(token is not None for token in tokens)
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token is None:
                continue
            scored = TokenScore(token, None)
            if request.params.logprobs is not None:
                scored = score(logits_BV[row : row + 1], [token], request.params.logprobs, self._sampled_ids)[0]
            text = request.append(token)
            if request.finish_reason is not None:
                self._release(request)
            prompt_scores = request.take_prompt_scores()
            self._emit(request, RequestOutput(text, (scored,), prompt_scores, request.finish_reason))

    def _sample(self, requests: list[Request], logits_BV: Tensor) -> list[int | None]:
        """Return a token for each row; a row whose logits are not finite ends its request and gets None."""
        try:
            check_finite(logits_BV)
            params = [request.params for request in requests]
            positions = [request.position for request in requests]
            return list(sample(self._sampled_ids.of(logits_BV), params, positions))
        except NotFinite as error:
            if len(requests) == 1:
                self.end(requests[0], "error", error)
                return [None]
        return [self._sample([request], logits_BV[row : row + 1])[0] for row, request in enumerate(requests)]

    # ---- start and end of a request ----------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return [self.begin_id, *(int(token) for token in self.tokenizer.encode(prompt))]
        ids = [int(token) for token in prompt]
        if not ids:
            raise UserError("the prompt has no token", allowed="one or more ids, or a text")
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size or token in self.tokenizer.unused_ids:
                raise UserError(
                    f"the id {token} is not in the vocabulary", allowed=f"0 to {self.tokenizer.vocab_size - 1}"
                )
        return ids

    def _enqueue(self, request: Request) -> None:
        self._open[request.request_id] = request
        self._submitted.append(request)

    def _release(self, request: Request) -> bool:
        """Free the row, the cache and the reservation of a request; returns False when it had ended before."""
        with self._lock:
            if self._open.pop(request.request_id, None) is None:
                return False
            if request in self._submitted:
                self._submitted.remove(request)
                return True
        self._scheduler.remove(request)
        self._runner.free(request.request_id)
        return True

    def _emit(self, request: Request, output: RequestOutput) -> None:
        try:
            request.on_output(output)
        except Exception:
            # A broken consumer must not stop the other requests.
            log.get("serve").exception("request %d: its on_output failed, the request ends", request.request_id)
            request.finish_reason = "error"
            self._release(request)
