"""Ranks the candidates of generated items by likelihood; the score is the accuracy of the likeliest."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.base.errors import UserError
from smalti.base.rng import derive_key
from smalti.config.eval import EvalConfig
from smalti.evals.graders.intervals import verdict, wilson_interval
from smalti.evals.likelihood import Progress, Window, score
from smalti.evals.results import TaskResult
from smalti.evals.tasks.generated import Item, generators
from smalti.serve.engine.engine import Engine


def run(
    name: str, engine: Engine, config: EvalConfig, seq_len: int, progress: Progress = lambda done, total: None
) -> TaskResult:
    """Measure the accuracy of the likeliest candidate, with n, chance and Wilson's 95 % interval.

    ``gold_probability`` is the mean probability of the right candidate, with those of an item scaled to sum to 1; it
    changes before the accuracy does. Ties of likelihood are broken by the seed.
    """
    make, chance = generators()[name]
    items = [make(index, shots=config.shots, seed=config.seed) for index in range(config.n)]
    windows = [window for item in items for window in candidate_windows(engine, item, seq_len)]
    nats = score(engine.model, windows, batch_tokens=config.batch_tokens, progress=progress).reshape(len(items), -1)
    samples = [_sample(item, row, config.seed) for item, row in zip(items, nats, strict=True)]
    correct = sum(bool(sample["correct"]) for sample in samples)
    interval = wilson_interval(correct, len(items))
    result = {
        "metric": "accuracy",
        "value": correct / len(items),
        "interval": list(interval),
        "interval_method": "wilson 95 %",
        "n": len(items),
        "correct": correct,
        "chance": chance,
        "verdict": verdict(interval, chance),
        "gold_probability": float(np.mean([sample["gold_probability"] for sample in samples])),
        "shots": config.shots,
    }
    return TaskResult(name, result, samples)


def candidate_windows(engine: Engine, item: Item, seq_len: int) -> list[Window]:
    """Return a window for each candidate, scored from the first token in which any two of them differ."""
    texts = [item.prompt + candidate for candidate in item.candidates]
    rows = [np.array([engine.begin_id, *engine.tokenizer.encode(text)], dtype=np.int64) for text in texts]
    longest = max(len(row) for row in rows) - 1
    if longest > seq_len:
        raise UserError(
            f"a question needs {longest} tokens and the longest context is {seq_len}",
            hint="give fewer examples: shots=1",
        )
    shared = 0
    while all(shared < len(row) and row[shared] == rows[0][shared] for row in rows):
        shared += 1
    return [Window(row, shared) for row in rows]


def _sample(item: Item, nats: NDArray[np.float64], seed: int) -> dict[str, Any]:
    best = np.flatnonzero(nats == nats.min())
    choice = int(best[derive_key("tie", seed, item.index) % len(best)])
    weights = np.exp(nats.min() - nats)
    return {
        "index": item.index,
        "prompt": item.prompt,
        "candidates": list(item.candidates),
        "log_likelihoods": [-float(value) for value in nats],
        "gold": item.gold,
        "choice": choice,
        "correct": choice == item.gold,
        "gold_probability": float(weights[item.gold] / weights.sum()),
    }
