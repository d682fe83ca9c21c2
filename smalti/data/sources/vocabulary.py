"""Checks token ids against the model's vocabulary, for sources whose format does not say their vocabulary.

An id beyond the model's embedding is a DataError that names source and place, not an index error in a kernel. Sources
with a known vocabulary are compared with the model before the run begins.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base import store
from smalti.base.errors import DataError
from smalti.data.sources.source import Source

_SAMPLE_ROWS = 4
_SAMPLE_TOKENS = 4096


def without_vocabulary(sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the sources whose format does not record the size of their vocabulary."""
    return [name for name, source in sources.items() if source.vocab_size is None]


def require_below(tokens: npt.NDArray[Any], vocab_size: int, name: str, where: str) -> None:
    """Raise DataError if a token of source ``name`` is ``vocab_size`` or more. ``where``: its place, for messages."""
    highest = int(tokens.max()) if tokens.size else 0
    if highest >= vocab_size:
        raise DataError(
            f"source '{name}' holds the token id {highest:,} at {where}; model.vocab_size={vocab_size}",
            allowed=f"ids from 0 to {vocab_size - 1:,}",
            hint=f"is data.sources.{name}.dtype right? If the ids are meant: "
            f"model.vocab_size={-(-(highest + 1) // 64) * 64} or more, that of their tokenizer",
        )


def check_samples(sources: Mapping[str, Source], vocab_size: int) -> None:
    """Check a few rows of each local source without a known vocabulary, to find a wrong dtype before the run begins.

    The other rows are checked when they are read.
    """
    for name in without_vocabulary(sources):
        source = sources[name]
        if not store.is_local(source.where):
            continue
        n = min(_SAMPLE_TOKENS, source.n_tokens)
        begins = np.unique(np.linspace(0, source.n_tokens - n, _SAMPLE_ROWS).astype(np.int64))
        rows = np.empty((begins.size, n), dtype=source.dtype)
        source.read_rows(begins, rows)
        for begin, row in zip(begins.tolist(), rows, strict=True):
            at = begin + int(row.argmax())
            require_below(row, vocab_size, name, f"its token {at:,} ({source.where})")
        source.close()
