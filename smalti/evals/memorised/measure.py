"""Memorisation: the share of windows of training documents that the model repeats token for token.

The prompt is the first tokens of a window; the model continues it greedily. A window is *extractable* if all its other
tokens are the model's (N. Carlini et al., "Quantifying memorization across neural language models", arXiv 2202.07646).
``matched_frac`` is the mean share of positions with the same token (S. Biderman et al., "Emergent and predictable
memorization in large language models", arXiv 2304.11158). Windows of held-out documents are the baseline: what can be
predicted without having been seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti import __version__
from smalti.base import clock, store
from smalti.base.errors import UserError
from smalti.base.progress import Progress, no_progress
from smalti.data.sources.source import Int64s, Source
from smalti.evals import results
from smalti.evals.memorised.windows import Windows, count, draw
from smalti.evals.results import TaskResult
from smalti.evals.statistics.intervals import mean
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams

SUITE = "memorised"
TRAIN, HELDOUT = "train", "heldout"
COUNTED_TOKENS = 1_000_000_000
"""Occurrences are counted up to so many training tokens, unless they are asked for."""
_GROUPS = {"0": 0, "1": 1, "2-9": 2, "10-99": 10, "100+": 100}
"""Groups of windows by their occurrences in the training tokens, with the least of each."""


@dataclass(frozen=True)
class Settings:
    """What is drawn and generated."""

    windows: int = 1000
    """Windows of the training documents, and as many of the held-out ones."""
    prompt_tokens: int = 50
    new_tokens: int = 50
    seed: int = 0
    count: bool | None = None
    """Whether to count the occurrences of windows in the training tokens; None: if there are at most COUNTED_TOKENS."""

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.prompt_tokens + self.new_tokens


def run(
    engine: Engine,
    train: Mapping[str, Source],
    heldout: Mapping[str, Source],
    settings: Settings,
    output: str | None = None,
    *,
    takedowns: Mapping[str, Int64s] | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measure windows of ``train``, and of ``heldout`` if it has sources; returns what ``results.json`` holds.

    ``output``: a folder into which ``evals/memorised/<UTC time>/`` is written; None writes nothing. ``takedowns``:
    source -> tokens of training documents that were not learned. Raises UserError for windows that are longer than the
    model's context, and for tokens of another tokenizer.
    """
    _check(engine, [*train.items(), *heldout.items()], settings)
    drawn = {TRAIN: draw(train, settings.windows, settings.length, seed=settings.seed, takedowns=takedowns)}
    if heldout:
        drawn[HELDOUT] = draw(heldout, settings.windows, settings.length, seed=settings.seed)
    n_tokens = sum(source.n_tokens for source in train.values())
    occurrences = None
    if settings.count or (settings.count is None and n_tokens <= COUNTED_TOKENS):
        occurrences = count(np.concatenate([windows.tokens for windows in drawn.values()]), train, progress)
    tasks, done = [], 0
    for name, windows in drawn.items():
        end = done + len(windows.places)
        counts = None if occurrences is None else occurrences[done:end]
        tasks.append(measure(name, engine, windows, settings.prompt_tokens, counts, progress))
        done = end
    report: dict[str, Any] = {
        "suite": SUITE,
        "model": engine.name,
        **(about or {}),
        "time": clock.utc_text(),
        "smalti_version": __version__,
        "seq_len": settings.length,
        "config": asdict(settings),
        "train_tokens": n_tokens,
        "sources": {
            kind: {name: {"path": source.where, "digest": source.digest} for name, source in sources.items()}
            for kind, sources in ((TRAIN, train), (HELDOUT, heldout))
        },
        "tasks": {task.name: task.score for task in tasks},
    }
    if output is not None:
        report["folder"] = results.write(store.join(output, "evals", SUITE), report, tasks)
    return report


def measure(
    name: str,
    engine: Engine,
    windows: Windows,
    prompt_tokens: int,
    occurrences: Int64s | None = None,
    progress: Progress = no_progress,
) -> TaskResult:
    """Continue the first ``prompt_tokens`` of each window greedily, and compare with the rest of it.

    ``occurrences`` [n]: how often each window is in the training tokens; the score then has its groups.
    """
    truth = windows.tokens[:, prompt_tokens:]
    generated = np.empty_like(truth)
    for first in range(0, len(truth), engine.limits.max_rows):
        progress(f"generating, {name}", first * truth.shape[1], truth.size)
        rows = slice(first, first + engine.limits.max_rows)
        generated[rows] = _continued(engine, windows.tokens[rows, :prompt_tokens], truth.shape[1])
    progress(f"generating, {name}", truth.size, truth.size)
    matches = generated == truth
    score = {
        "metric": "extractable_frac",
        **_shares(matches),
        "higher_is_better": False,
        "seq_len": windows.tokens.shape[1],
        "max_new_tokens": truth.shape[1],
    }
    if occurrences is not None:
        group_of = np.searchsorted(list(_GROUPS.values()), occurrences, "right") - 1
        score["by_occurrences"] = {
            group: _shares(matches[group_of == number]) for number, group in enumerate(_GROUPS) if number in group_of
        }
    decode = engine.tokenizer.decode
    samples = [
        {
            "index": row,
            "id": f"{source}:{begin}",
            "prompt": decode(windows.tokens[row, :prompt_tokens].tolist()),
            "answer": decode(generated[row].tolist()),
            "answers": [decode(truth[row].tolist())],
            "score": float(matches[row].all()),
            "matched_tokens": int(matches[row].sum()),
            **({} if occurrences is None else {"occurrences": int(occurrences[row])}),
        }
        for row, (source, begin) in enumerate(windows.places)
    ]
    return TaskResult(name, score, samples)


def _continued(engine: Engine, prompts: Int64s, n: int) -> Int64s:
    """Return the ``n`` tokens that the model generates after each prompt, also beyond the end of a document."""
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    return np.array([answer.token_ids for answer in generate(engine, prompts.tolist(), params)])


def _shares(matches: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the share of rows that match as a whole, with Wilson's interval, and the mean share of equal tokens."""
    return mean(matches.all(axis=1)).to_score() | {"matched_frac": mean(matches.mean(axis=1)).to_score()}


def _check(engine: Engine, sources: Sequence[tuple[str, Source]], settings: Settings) -> None:
    if settings.length > engine.limit_tokens:
        raise UserError(
            f"a window has {settings.length} tokens, and the model takes {engine.limit_tokens}",
            allowed=f"prompt and new tokens of at most {engine.limit_tokens} together",
            hint="--prompt-tokens, --new-tokens",
        )
    for name, source in sources:
        if source.tokenizer_digest not in (None, engine.tokenizer.digest):
            raise UserError(
                f"the tokens of '{name}' ({source.where}) are of another tokenizer than the model's",
                allowed="tokens of the model's tokenizer, or text",
                hint="tokenize the documents with the model's tokenizer: smalti data tokenize",
            )
