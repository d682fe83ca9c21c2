"""The comparison: scores of each way with intervals, paired differences from the first one, and costs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smalti.evals.samples import Sample
from smalti.evals.statistics import paired
from smalti.evals.statistics.intervals import bits_per_byte, mean
from smalti.evals.statistics.paired import Difference
from smalti.tune.compare.evaluate import nats_and_bytes, samples_of
from smalti.tune.compare.questions import ANSWERS, LIKELIHOOD
from smalti.tune.compare.ways import PROMPTED

_WORDS = {"A better": "worse", "B better": "better", "no difference shown": "no difference shown"}


def compared(ways: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ways with scores, and differences from the first of them.

    ``ways``: name -> ``folder`` (of results) and ``cost``. The p values of all differences in the answers are
    corrected together (Holm), those of held-out sets together.
    """
    samples = {way: samples_of(entry["folder"])[1] for way, entry in ways.items()}
    first = next(iter(ways))
    result = {way: {**entry, "scores": _scores(samples[way])} for way, entry in ways.items()}
    for is_heldout in (False, True):
        differences = {
            (way, task): _difference(task, samples[first][task], samples[way][task])
            for way in ways
            for task in samples[first]
            if way != first and task in samples[way] and (task not in (LIKELIHOOD, ANSWERS)) == is_heldout
        }
        p_values = paired.holm([difference.p for difference in differences.values()])
        for ((way, task), difference), p in zip(differences.items(), p_values, strict=True):
            score = result[way]["scores"][task]
            verdict = difference.verdict(p, higher_is_better=task == ANSWERS)
            score["difference"] = {
                "from": first,
                "value": difference.value,
                "interval": difference.interval,
                "p_corrected": p,
                "verdict": _WORDS[verdict],
            }
    return {"ways": result, "baseline": first, "break_even": break_even(result)}


def _scores(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    return {
        task: (
            {"metric": "accuracy", **mean([bool(sample.correct) for sample in rows]).to_score()}
            if task == ANSWERS
            else {"metric": "bits_per_byte", **bits_per_byte(*nats_and_bytes(rows)).to_score()}
        )
        for task, rows in samples.items()
    }


def _difference(task: str, a: Sequence[Sample], b: Sequence[Sample]) -> Difference:
    if task == ANSWERS:
        return paired.of_items(*([float(bool(sample.correct)) for sample in side] for side in (a, b)))
    (nats_a, n_bytes), (nats_b, _) = nats_and_bytes(a), nats_and_bytes(b)
    bits_a, bits_b = ([value / math.log(2) for value in nats] for nats in (nats_a, nats_b))
    return paired.of_ratios(bits_a, bits_b, n_bytes)


def break_even(ways: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return tuned way -> prompted way -> the answers after which tuning has cost fewer FLOPs, training included.

    A prompted way is absent where its answers do not cost more.
    """
    answers: dict[str, dict[str, float]] = {}
    for tuned, entry in ways.items():
        if tuned in PROMPTED:
            continue
        for way in PROMPTED:
            more = ways[way]["cost"]["answer_flops"] - entry["cost"]["answer_flops"] if way in ways else 0.0
            if more > 0:
                answers.setdefault(tuned, {})[way] = entry["cost"]["train_flops"] / more
    return answers
