"""A trained classifier: its file and its scores.

The file is an .npz of plain arrays, read without pickle, with the digest of its content. Equal training: equal bytes.
"""

import io
import json
import math
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import sha256_bytes
from smalti.data.prepare.classifier.features import BITS, VERSION, features

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classifier:
    """A linear classifier; ``slope`` and ``offset`` turn its sums into probabilities."""

    weights: F32
    bias: float
    slope: float
    offset: float
    report: dict[str, Any]
    """How it was trained, and how good it is on held-out documents. Plain values."""

    def logit(self, text: str) -> float:
        """Return the sum of a text, not calibrated."""
        return logit_of(self.weights, self.bias, features(text))

    def score(self, text: str) -> float:
        """Return the probability that a text is good, among texts as those that it was trained on."""
        return sigmoid(self.slope * self.logit(text) + self.offset)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides scores, and of the report."""
        return sha256_bytes(self._header().encode() + self.weights.astype("<f4").tobytes())

    def save(self, path: str) -> None:
        """Write the file."""
        data = io.BytesIO()
        header = np.frombuffer(self._header().encode(), np.uint8)
        digest = np.frombuffer(bytes.fromhex(self.digest), np.uint8)
        np.savez_compressed(data, weights=self.weights.astype("<f4"), header=header, digest=digest)
        store.write_bytes(path, data.getvalue())

    @classmethod
    def load(cls, path: str) -> "Classifier":
        """Read a file. DataError if it is missing, damaged, or of another version."""
        if not store.exists(path):
            raise DataError(f"{path} does not exist", hint="smalti data classifier train writes one")
        try:
            with np.load(io.BytesIO(store.read_bytes(path)), allow_pickle=False) as arrays:
                weights, digest = arrays["weights"], arrays["digest"].tobytes().hex()
                header = json.loads(arrays["header"].tobytes())
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise DataError(f"{path} is no classifier: {error}", hint="smalti data classifier train") from error
        if (header.get("version"), len(weights)) != (VERSION, 1 << BITS):
            raise DataError(f"{path} is of another version of Smalti", hint="train it again")
        classifier = cls(weights, *(header[name] for name in ("bias", "slope", "offset", "report")))
        if classifier.digest != digest:
            raise DataError(f"{path} is damaged: its digest is another", hint="copy it again")
        return classifier

    def _header(self) -> str:
        values = {"version": VERSION, "bias": self.bias, "slope": self.slope, "offset": self.offset}
        return json.dumps(values | {"report": self.report}, sort_keys=True)


def logit_of(weights: F32, bias: float, buckets: npt.NDArray[np.uint32]) -> float:
    """Return the sum of the weights of a document, whose n-grams together have length 1."""
    return float(weights[buckets].sum(dtype=np.float64)) / math.sqrt(max(len(buckets), 1)) + bias


def sigmoid(value: float) -> float:
    """Return 1 / (1 + e^-value)."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
