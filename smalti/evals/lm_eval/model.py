"""The engine as a model of lm-evaluation-harness: the same tokens, and so the same scores, as its `hf` backend.

Text follows what the tokenizer's own template begins with, which may be nothing; an empty context is the begin token.
Special tokens in a text are recognised. What is too long loses its start.
"""

from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from smalti.base.errors import UserError
from smalti.evals.likelihood import Progress, Window, score_greedy
from smalti.evals.tasks.windows import TooLong
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams

_LONGEST_ANSWER = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_ANSWER_TOKENS = 256
_SAMPLING = ("temperature", "top_p", "top_k")
_KNOWN = {"until", "do_sample", *_LONGEST_ANSWER, *_SAMPLING}


class SmaltiLM(TemplateLM):  # type: ignore[misc]
    """An engine with a longest context in tokens."""

    def __init__(self, engine: Engine, max_length: int, *, batch_tokens: int = 4096) -> None:
        super().__init__()
        self.engine = engine
        self.max_length = max_length
        self.progress: Progress = lambda done, total: None
        self.truncated: set[str] = set()
        """Contexts whose answer reached its longest length."""
        self._batch_tokens = batch_tokens
        self._begin = engine.tokenizer.decode([engine.begin_id], skip_special=False)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.engine.end_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self.engine.begin_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, after the template's unless the text begins with the begin token."""
        ids = self.engine.tokenizer.encode(string, special=True)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._begin)
        return [*self.engine.tokenizer.template_ids, *ids] if add_special_tokens else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for _strings, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise TooLong(
                    f"an answer has {len(continuation)} tokens",
                    allowed=f"1 to {self.max_length}",
                    hint="leave the task out, or evaluate with a longer seq_len",
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            windows.append(Window(np.array(ids, dtype=np.int64), len(ids) - len(continuation)))
        scores = score_greedy(self.engine.model, windows, batch_tokens=self._batch_tokens, progress=self.progress)
        return [(-float(nats), bool(greedy)) for nats, greedy in zip(scores.nats, scores.greedy, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each whole text, read in windows that do not overlap."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owner: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            of_text = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += of_text
            owner += [number] * len(of_text)
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return [float(total) for total in np.bincount(owner, weights=scores, minlength=len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated answer to each context, without the text that stops it."""
        contexts = [request.args[0] for request in requests]
        params = [_params(request.args[1]) for request in requests]
        prompts = []
        for context, options in zip(contexts, params, strict=True):
            room = self.max_length - options.max_tokens
            if room < 1:
                raise TooLong(
                    f"an answer has up to {options.max_tokens} tokens",
                    allowed=f"1 to {self.max_length - 1}",
                    hint="leave the task out, or evaluate with a longer seq_len",
                )
            prompts.append(self.tok_encode(context)[-room:])
        completions = generate(self.engine, prompts, params)
        for context, completion in zip(contexts, completions, strict=True):
            if completion.finish_reason == "length":
                self.truncated.add(context)
        return [completion.text for completion in completions]


def _params(options: dict[str, Any]) -> SamplingParams:
    """Return the options of an answer. UserError for one that the engine does not have."""
    unknown = [name for name, value in options.items() if name not in _KNOWN and value is not None]
    if unknown:
        raise UserError(
            f"the task sets the generation option '{unknown[0]}', which the engine does not have",
            allowed=", ".join(sorted(_KNOWN)),
            hint="leave the task out",
        )
    until = options.get("until") or []
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    longest = next((int(options[name]) for name in _LONGEST_ANSWER if options.get(name)), _DEFAULT_ANSWER_TOKENS)
    sampled = options.get("do_sample", bool(options.get("temperature")))
    sampling = {name: options[name] for name in _SAMPLING if options.get(name) is not None} if sampled else {}
    return SamplingParams(max_tokens=longest, stop=stop, **({"temperature": 1.0} if sampled else {}) | sampling)
