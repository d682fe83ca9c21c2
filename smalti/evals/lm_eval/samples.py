"""From the samples that lm-evaluation-harness logs to samples and scores of ours."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from smalti.evals.statistics.clusters import ratio_of_sums
from smalti.evals.statistics.intervals import Estimate, mean
from smalti.evals.statistics.student import quantile
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.heldout import compressed_bits_per_byte

Json = dict[str, Any]


def sample_of(row: Json, kind: str, gold: Any) -> Json:
    """Return a sample of ours. ``kind`` is the task's output type, ``gold`` its right option or answers.

    ``metrics`` are lm-eval's values of the item; its ``acc`` or ``exact_match`` decides ``correct``.
    """
    sample: Json = {"index": row["doc_id"]}
    metrics = {name: row[name] for name in row["metrics"] if isinstance(row[name], bool | int | float)}
    if kind == "loglikelihood_rolling":
        text = row["arguments"][0][0]
        nats = -float(row["filtered_resps"][0])
        return sample | {"prompt": text[:200], "n_bytes": len(text.encode()), "nats": nats}
    if kind == "generate_until":
        sample |= _generated(row, gold)
    else:
        sample |= _ranked(row, gold if kind == "multiple_choice" else 0)
    for name in ("acc", "exact_match", *metrics):
        if name in metrics:
            value = metrics[name]
            sample |= {"correct": bool(value)} if value in (0, 1) else {"score": float(value)}
            break
    return sample | {"metrics": {name: float(value) for name, value in metrics.items()}}


def _ranked(row: Json, gold: Any) -> Json:
    # acc_mutual_info adds the options once more, without their context.
    n = len(row["arguments"]) // (2 if "acc_mutual_info" in row["metrics"] else 1)
    contexts, texts = ([str(argument[part]) for argument in row["arguments"][:n]] for part in (0, 1))
    scores = [float(answer[0]) for answer in row["filtered_resps"][:n]]
    several = len(set(contexts)) > 1
    is_index = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < n
    sample: Json = {"prompt": contexts[gold if several and is_index else 0], "choices": contexts if several else texts}
    sample |= {"continuation": texts[0]} if several else {}
    sample |= {"log_likelihoods": scores, "choice": int(np.argmax(scores))} if n > 1 else {"log_likelihoods": scores}
    if is_index:
        weights = np.exp(np.array(scores) - max(scores))
        n_bytes = max(1, len(texts[gold].encode()))
        sample |= {"gold": gold, "gold_bytes": n_bytes, "bits_per_byte": -scores[gold] / math.log(2) / n_bytes}
        sample["gold_probability"] = float(weights[gold] / weights.sum()) if n > 1 else math.exp(min(0.0, scores[0]))
    return sample


def _generated(row: Json, gold: Any) -> Json:
    answers = [str(answer) for answer in gold] if isinstance(gold, list | tuple) else [str(gold)]
    parsed = row["filtered_resps"][0]
    parsed = parsed[0] if isinstance(parsed, list) and parsed else parsed
    return {
        "prompt": str(row["arguments"][0][0]),
        "answer": str(row["resps"][0][0]),
        "parsed": None if parsed in (None, "[invalid]") else str(parsed),
        "answers": answers,
    }


def score_of(samples: Sequence[Json], texts: Sequence[str], kind: str) -> Json:
    """Return the score of a task: accuracy, bits per byte, or the mean of another metric; each with its interval.

    ``texts``: the documents of a task of kind ``loglikelihood_rolling``. ``metrics`` has the mean of each of lm-eval's.
    """
    if kind == "loglikelihood_rolling":
        return _bits_per_byte(samples, [text.encode() for text in texts])
    if all("correct" in sample for sample in samples):
        choices = [len(sample.get("choices", ())) for sample in samples]
        score = accuracy(samples, sum(1 / n if n > 1 else 0.0 for n in choices) / len(choices))
    else:
        name = next(iter(samples[0]["metrics"]), "score")
        score = {"metric": name, **mean([sample["metrics"].get(name, 0.0) for sample in samples]).to_score()}
    if kind == "generate_until":
        score["truncated_frac"] = sum(sample["truncated"] for sample in samples) / len(samples)
        score["unparsed_frac"] = sum(sample["parsed"] is None for sample in samples) / len(samples)
    names = [name for name in samples[0]["metrics"] if all(name in sample["metrics"] for sample in samples)]
    means = {name: mean([sample["metrics"][name] for sample in samples]).to_score() for name in names}
    return score | {"metrics": means}


def _bits_per_byte(samples: Sequence[Json], texts: Sequence[bytes]) -> Json:
    bits = np.array([sample["nats"] for sample in samples]) / math.log(2)
    sizes = np.array([sample["n_bytes"] for sample in samples], dtype=np.float64)
    value = float(bits.sum() / sizes.sum())
    estimate = Estimate(value, None, None, len(samples), "none: one document")
    if np.count_nonzero(sizes) > 1:
        ratio = ratio_of_sums(bits, sizes)
        half = quantile(0.975, ratio.df) * math.sqrt(ratio.variance)
        ends = (value - half, value + half)
        estimate = Estimate(value, math.sqrt(ratio.variance), ends, len(samples), "student's t 95 %", df=ratio.df)
    sums = {"n_bytes": int(sizes.sum()), "nats": float(sum(sample["nats"] for sample in samples))}
    return {"metric": "bits_per_byte", **estimate.to_score(), **sums, **compressed_bits_per_byte(list(texts))}
