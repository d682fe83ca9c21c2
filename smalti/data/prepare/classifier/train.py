"""Trains a classifier on two folders of documents: logistic regression by Adagrad, one document at a time.

Guarantees: the same documents and seed give the same file. Equal texts are in the same split, so none that was trained
on is held out. Memory: the n-grams of the documents, about 10 kB each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smalti.base.errors import DataError
from smalti.base.progress import Progress, no_progress
from smalti.base.rng import derive_key
from smalti.data.documents.files import find_files
from smalti.data.documents.readers import ReadOptions, read_tasks
from smalti.data.prepare.classifier.features import BITS, U32, features
from smalti.data.prepare.classifier.measure import F64, area_under_curve, calibrate, calibration_error, reliability
from smalti.data.prepare.classifier.model import F32, Classifier, logit_of, sigmoid

_EPOCHS = 5
_RATE = 0.5
_HELDOUT_FRAC, _CALIBRATION_FRAC = 0.2, 0.1
_MIN_DOCUMENTS = 20


@dataclass(frozen=True)
class _Example:
    buckets: U32
    is_good: float
    place: float
    """A number from 0 to 1 that depends on the text, which decides its split."""


def train_classifier(
    good: str, bad: str, *, text_field: str = "text", seed: int = 17, progress: Progress = no_progress
) -> Classifier:
    """Train on the documents of two files or folders; 20 % are held out and 10 % calibrate the probabilities.

    Raises:
        DataError: a folder is missing or has too few documents; a text is in both.
    """
    examples: dict[int, _Example] = {}
    for path, label in ((good, 1.0), (bad, 0.0)):
        _read(examples, path, label, ReadOptions(text_field), seed, progress)
    heldout = [each for each in examples.values() if each.place < _HELDOUT_FRAC]
    middle = [each for each in examples.values() if 0 <= each.place - _HELDOUT_FRAC < _CALIBRATION_FRAC]
    fitted = [each for each in examples.values() if each.place >= _HELDOUT_FRAC + _CALIBRATION_FRAC]
    for name, part in (("training", fitted), ("calibration", middle), ("held-out", heldout)):
        if len({each.is_good for each in part}) < 2:
            raise DataError(f"the {name} documents are all of one kind", hint="give more good and more bad documents")
    weights, bias = _fit(fitted, seed, progress)
    slope, offset = calibrate(*_logits(weights, bias, middle))
    logits, labels = _logits(weights, bias, heldout)
    area, interval = area_under_curve(logits[labels > 0], logits[labels == 0])
    rows = reliability(np.array([sigmoid(slope * value + offset) for value in logits]), labels)
    n_good = sum(each.is_good for each in examples.values())
    report = {
        "good_documents": int(n_good),
        "bad_documents": int(len(examples) - n_good),
        "heldout_documents": len(heldout),
        "seed": seed,
        "auc": area,
        "auc_interval": interval,
        "calibration_error": calibration_error(rows),
        "reliability": rows,
    }
    return Classifier(weights, bias, slope, offset, report)


def _read(
    examples: dict[int, _Example], path: str, label: float, options: ReadOptions, seed: int, progress: Progress
) -> None:
    """Add the distinct texts of a folder. DataError if there are too few, or one is of the other kind already."""
    files = find_files(path).files
    total, done, count = sum(file.n_bytes for file in files), 0, 0
    for task in read_tasks(files, options):
        for batch in task.batches():
            for text in filter(str.strip, batch.column("text").to_pylist()):
                key = derive_key(seed, "classifier", text)
                known = examples.get(key)
                if known is not None and known.is_good != label:
                    raise DataError(f"a document is both good and bad: {text[:60]!a}", hint="remove it from one")
                examples[key] = _Example(features(text), label, key / 2.0**63)
                count += known is None
        done += sum(file.n_bytes for file in task.files)
        progress(f"reading {path}", done, total)
    if count < _MIN_DOCUMENTS:
        raise DataError(f"{path} has {count} different documents", allowed=f"at least {_MIN_DOCUMENTS}")


def _fit(examples: Sequence[_Example], seed: int, progress: Progress) -> tuple[F32, float]:
    """Return weights and bias. Both kinds weigh the same, however many of each there are."""
    weights, squares = np.zeros(1 << BITS, np.float32), np.full(1 << BITS, 1e-6, np.float32)
    bias, bias_squares = 0.0, 1e-6
    n_good = sum(each.is_good for each in examples)
    weight_of = {1.0: len(examples) / (2 * n_good), 0.0: len(examples) / (2 * (len(examples) - n_good))}
    generator = np.random.Generator(np.random.PCG64(seed))
    total = _EPOCHS * len(examples)
    for epoch in range(_EPOCHS):
        for index, number in enumerate(generator.permutation(len(examples))):
            each = examples[number]
            value = np.float32(1 / np.sqrt(max(len(each.buckets), 1)))
            error = sigmoid(logit_of(weights, bias, each.buckets)) - each.is_good
            slope = error * weight_of[each.is_good]
            gradient = np.float32(slope) * value
            squares[each.buckets] += gradient * gradient
            weights[each.buckets] -= _RATE * value * gradient / np.sqrt(squares[each.buckets])
            bias_squares += slope * slope
            bias -= 0.1 * slope / float(np.sqrt(bias_squares))
            if index % 256 == 0:
                progress("training", epoch * len(examples) + index, total)
    return weights, bias


def _logits(weights: F32, bias: float, examples: Sequence[_Example]) -> tuple[F64, F64]:
    logits = [logit_of(weights, bias, each.buckets) for each in examples]
    return np.array(logits), np.array([each.is_good for each in examples])
