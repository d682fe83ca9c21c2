"""The folder of tokenized examples: written once as a whole, read by any number of ranks through memory maps.

``examples.json`` is the record, with the counts and the SHA-256 of each array: ``tokens`` (u2 or u4, all sequences one
after the other), ``in_loss`` (bool, beside each token), ``ends`` (i8, end of each sequence), ``first`` (i8, first
sequence of each example, and the number of sequences), ``values`` (f4, [sequences, columns]). Local folders only.
"""

import json
from array import array
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_file
from smalti.data.documents.publish import publication
from smalti.data.examples.example import Example
from smalti.data.tokenizer.encode import Tokenizer

KIND = "examples"
RECORD_NAME = "examples.json"
FORMAT = 1
_ARRAYS = ("tokens", "in_loss", "ends", "first", "values")
_HINT = "write the examples again: the same 'smalti tune' command, without this folder"


@dataclass(frozen=True)
class ExamplesRecord:
    """The content of ``examples.json``. The fields that token files have too are named as in their manifest."""

    n_examples: int
    n_sequences: int
    n_tokens: int
    n_loss_tokens: int
    n_text_bytes: int
    """UTF-8 bytes of the text in the loss; 0 if unknown."""
    longest: int
    """Most targets that an example has, of all its sequences."""
    columns: tuple[str, ...]
    """Names of the columns of ``values``."""
    eod_id: int
    vocab_size: int
    tokenizer_digest: str
    files: dict[str, str]
    """Array -> SHA-256 of its file."""
    digest: str = ""
    """Digest of all fields above."""

    @property
    def pairs(self) -> bool:
        """True if each example has two sequences, the chosen and the rejected."""
        return self.n_sequences == 2 * self.n_examples

    def content_digest(self) -> str:
        """Compute the digest of the other fields."""
        return digest_json({key: value for key, value in asdict(self).items() if key != "digest"})

    @classmethod
    def parse(cls, data: bytes, where: str) -> Self:
        """Parse and check ``examples.json``. Raises DataError if it is damaged or of another version."""
        try:
            raw = json.loads(data)
            record = cls(**{field.name: raw[field.name] for field in fields(cls)} | {"columns": tuple(raw["columns"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where} is not the record of a folder of examples: {error!r}", hint=_HINT) from error
        if raw.get("format") != FORMAT or not raw.get("complete"):
            raise DataError(f"{where} is incomplete, or of format {raw.get('format')}, not {FORMAT}", hint=_HINT)
        if record.digest != record.content_digest():
            raise DataError(f"{where} was changed after it was written: its digest does not match", hint=_HINT)
        return record

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read and check the record of a folder."""
        path = store.join(folder, RECORD_NAME)
        if not store.exists(path):
            raise DataError(f"{folder} holds no examples: {path} does not exist", hint=_HINT)
        return cls.parse(store.read_bytes(path), path)


def write_examples(folder: str | Path, examples: Iterable[Example], tokenizer: Tokenizer) -> ExamplesRecord:
    """Write examples into ``folder``, which appears as a whole. Memory: 16 bytes for each sequence, 4 for each value.

    Raises DataError for no examples, and for one with an id outside the vocabulary, an empty loss mask or other columns
    than those before it.
    """
    with publication(str(folder), kind=KIND, record_name=RECORD_NAME) as result:
        counts = _write_arrays(examples, tokenizer.vocab_size, result.work)
        files = {name: sha256_file(result.work / f"{name}.npy") for name in _ARRAYS}
        record = ExamplesRecord(
            **counts,
            eod_id=tokenizer.eod_id,
            vocab_size=tokenizer.vocab_size,
            tokenizer_digest=tokenizer.digest,
            files=files,
        )
        record = ExamplesRecord(**{**vars(record), "digest": record.content_digest()})
        result.record.update(asdict(record))
    return record


def check_files(folder: str | Path, record: ExamplesRecord) -> None:
    """Raise DataError for an array that is missing or whose SHA-256 is not that of the record."""
    for name, digest in record.files.items():
        path = Path(folder) / f"{name}.npy"
        if not path.is_file():
            raise DataError(f"{path} is missing", hint=_HINT)
        if sha256_file(path) != digest:
            raise DataError(f"{path} is corrupt: its SHA-256 does not match {RECORD_NAME}", hint=_HINT)


def open_array(folder: str | Path, name: str) -> npt.NDArray[Any]:
    """Memory-map an array of the folder."""
    if not store.is_local(folder):
        raise UserError(f"examples cannot be read from {folder}", allowed="a local folder", hint="copy it to a disk")
    array: npt.NDArray[Any] = np.load(Path(folder) / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return array


class _Array:
    """A ``.npy`` file of one dimension that is written part by part; equal to that of ``np.save``."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self._size = 0
        self._write_header()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write values behind the others."""
        self._file.write(values.astype(self._dtype).tobytes())
        self._size += values.size

    def close(self) -> None:
        """Write the header again, with the size: numpy leaves room for its digits."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._size,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _write_arrays(examples: Iterable[Example], vocab_size: int, folder: Path) -> dict[str, Any]:
    """Write the arrays of the folder; return the counts of its record."""
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    ends, first, values = array("q"), array("q", [0]), array("f")
    columns: tuple[str, ...] | None = None
    n_tokens, n_loss_tokens, n_bytes, longest = 0, 0, 0, 0
    with (
        closing(_Array(folder / "tokens.npy", dtype)) as tokens,
        closing(_Array(folder / "in_loss.npy", np.dtype(bool))) as in_loss,
    ):
        for example in examples:
            columns = tuple(sorted(example.values)) if columns is None else columns
            if tuple(sorted(example.values)) != columns:
                raise DataError(
                    f"example {example.id} has the values {sorted(example.values)}", allowed=f"{list(columns)}"
                )
            for ids, mask in example.sequences:
                ids_n, mask_n = np.asarray(ids, dtype=np.int64), np.asarray(mask, dtype=bool)
                _check(example.id, ids_n, mask_n, vocab_size)
                tokens.append(ids_n)
                in_loss.append(mask_n)
                n_tokens, n_loss_tokens = n_tokens + ids_n.size, n_loss_tokens + int(mask_n.sum())
                ends.append(n_tokens)
                values.extend(example.values[name] for name in columns)
            first.append(len(ends))
            n_bytes += example.n_loss_bytes
            longest = max(longest, sum(len(ids) - 1 for ids, _ in example.sequences))
    if columns is None or not ends:
        raise DataError("there are no examples to write", hint="check the files and the rules that drop examples")
    np.save(folder / "ends.npy", np.asarray(ends, dtype=np.int64))
    np.save(folder / "first.npy", np.asarray(first, dtype=np.int64))
    np.save(folder / "values.npy", np.asarray(values, dtype=np.float32).reshape(len(ends), len(columns)))
    return {
        "n_examples": len(first) - 1,
        "n_sequences": len(ends),
        "n_tokens": n_tokens,
        "n_loss_tokens": n_loss_tokens,
        "n_text_bytes": n_bytes,
        "longest": longest,
        "columns": columns,
    }


def _check(name: str, ids_n: npt.NDArray[np.int64], mask_n: npt.NDArray[np.bool_], vocab_size: int) -> None:
    if ids_n.ndim != 1 or ids_n.shape != mask_n.shape or ids_n.size < 2:
        raise DataError(f"example {name} has {ids_n.shape} ids and {mask_n.shape} mask", allowed="[n] each, n >= 2")
    if ids_n.min() < 0 or ids_n.max() >= vocab_size:
        raise DataError(f"example {name} has an id outside the vocabulary", allowed=f"0 to {vocab_size - 1}")
    if mask_n[0] or not mask_n.any():
        what = "its first token in the loss, which nothing predicts" if mask_n[0] else "no token in the loss"
        raise DataError(f"example {name} has {what}")
