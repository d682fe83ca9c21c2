"""From the samples that lm-evaluation-harness logs to samples and scores of ours."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smalti.base.errors import DataError
from smalti.evals.statistics.averages import average
from smalti.evals.statistics.intervals import Estimate, bits_per_byte, mean
from smalti.evals.tasks.accuracy import accuracy
from smalti.evals.tasks.heldout import compressed_bits_per_byte

Json = dict[str, Any]
_RIGHT_OR_WRONG = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")


def sample_of(row: Json, kind: str, gold: Any) -> Json:
    """Return a sample of ours. ``kind`` is the task's output type, ``gold`` its right option or answers.

    ``metrics`` are lm-eval's values of the item.
    """
    sample: Json = {"index": row["doc_id"]}
    if kind == "loglikelihood_rolling":
        text = row["arguments"][0][0]
        nats = -float(row["filtered_resps"][0])
        return sample | {"prompt": text[:200], "n_bytes": len(text.encode()), "nats": nats}
    if kind == "generate_until":
        sample |= _generated(row, gold)
    else:
        sample |= _ranked(row, gold if kind == "multiple_choice" else 0)
    return sample | {"metrics": {name: row[name] for name in row["metrics"] if isinstance(row[name], int | float)}}


def grade(samples: Sequence[Json]) -> str | None:
    """Grade the samples by the task's metric and return its name; None where no sample has a number.

    The metric is ``acc``, ``exact_match``, or the task's first. Where it says right or wrong of each sample, they have
    ``correct``, else ``score``; a sample without the metric has neither.
    """
    names = ("acc", "exact_match", *(name for sample in samples for name in sample.get("metrics", ())))
    metric = next((name for name in names if any(name in sample.get("metrics", ()) for sample in samples)), None)
    measured = [sample for sample in samples if metric in sample.get("metrics", ())]
    values = [sample["metrics"][metric] for sample in measured]
    # An F1 of only 0 and 1 is still one, so values alone do not decide.
    says_right = metric in _RIGHT_OR_WRONG or all(isinstance(value, bool) for value in values)
    is_binary = says_right and all(value in (0, 1) for value in values)
    for sample, value in zip(measured, values, strict=True):
        sample |= {"correct": bool(value)} if is_binary else {"score": float(value)}
    return metric


def _ranked(row: Json, gold: Any) -> Json:
    # acc_mutual_info adds the options once more, without their context.
    n = len(row["arguments"]) // (2 if "acc_mutual_info" in row["metrics"] else 1)
    contexts, texts = ([str(argument[part]) for argument in row["arguments"][:n]] for part in (0, 1))
    scores = [float(answer[0]) for answer in row["filtered_resps"][:n]]
    is_schema = len(set(contexts)) > 1
    is_index = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < n
    sample: Json = {
        "prompt": contexts[gold if is_schema and is_index else 0],
        "choices": contexts if is_schema else texts,
    }
    sample |= {"continuation": texts[0]} if is_schema else {}
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


def score_of(samples: Sequence[Json], texts: Sequence[str], kind: str, reported: Mapping[str, float]) -> Json:
    """Grade the samples and return the score of a task: accuracy, bits per byte, or the mean of another metric.

    Each has its interval; a metric of the whole set, which no sample has, is the first that lm-eval has ``reported``,
    without one. ``texts``: the documents of a task of kind ``loglikelihood_rolling``. ``metrics`` has the mean of each
    of lm-eval's.
    """
    if kind == "loglikelihood_rolling":
        return _bits_per_byte(samples, [text.encode() for text in texts])
    metric = grade(samples)
    answered = [sample for sample in samples if "correct" in sample]
    if metric is None:
        if not reported:
            raise DataError("lm-evaluation-harness gives no number for this task", hint="leave it out")
        name, value = next(iter(reported.items()))
        whole = Estimate(value, None, None, len(samples), "none: a metric of the whole set")
        score = {"metric": name.partition(",")[0], **whole.to_score()}
    elif answered:
        choices = [len(sample.get("choices", ())) for sample in answered]
        score = accuracy(answered, sum(1 / n if n > 1 else 0.0 for n in choices) / len(choices))
    else:
        score = {"metric": metric, **mean([sample["score"] for sample in samples if "score" in sample]).to_score()}
    if kind == "generate_until":
        score["truncated_frac"] = sum(sample["truncated"] for sample in samples) / len(samples)
        score["unparsed_frac"] = sum(sample["parsed"] is None for sample in samples) / len(samples)
    names = dict.fromkeys(name for sample in samples for name in sample["metrics"])
    means = {
        name: mean([sample["metrics"][name] for sample in samples if name in sample["metrics"]]).to_score()
        for name in names
    }
    return score | {"metrics": means}


def group_scores(tasks: Mapping[str, Json]) -> dict[str, Json]:
    """Return the score of each group, the mean of its tasks with lm-eval's weights, from the scores of all tasks.

    A group whose tasks have different metrics has none.
    """
    members: dict[str, list[tuple[Json, float]]] = {}
    for score in tasks.values():
        for name, by_size in score.get("lm_eval", {}).get("groups", {}).items():
            members.setdefault(name, []).append((score, score["n"] if by_size else 1))
    groups = {}
    for name, rows in members.items():
        if len({score["metric"] for score, _ in rows}) == 1:
            mean_of_tasks = average([Estimate.from_score(score) for score, _ in rows], [weight for _, weight in rows])
            groups[name] = {"metric": rows[0][0]["metric"], **mean_of_tasks.to_score(), "n_tasks": len(rows)}
    return groups


def _bits_per_byte(samples: Sequence[Json], texts: Sequence[bytes]) -> Json:
    nats, n_bytes = ([sample[key] for sample in samples] for key in ("nats", "n_bytes"))
    estimate = bits_per_byte(nats, n_bytes)
    sums = {"n_bytes": sum(n_bytes), "nats": math.fsum(nats)}
    return {"metric": "bits_per_byte", **estimate.to_score(), **sums, **compressed_bits_per_byte(list(texts))}
