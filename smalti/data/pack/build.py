"""``smalti data pack``: builds the best-fit index of a folder of tokens, and compares it with concatenate-and-chop.

Reads every token once to find the ends of documents. Memory: about 40 bytes per document.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from smalti.base.errors import UserError
from smalti.data.pack.best_fit import Rows, document_ends, n_cut_by_chopping, pack
from smalti.data.pack.concat import n_sequences
from smalti.data.pack.index import PackRecord, pack_folder, write_index
from smalti.data.sources.source import Int64s, Source

MAX_SEQ_LEN = 1 << 20


@dataclass(frozen=True)
class Packing:
    """The documents of a source packed for one sequence length; ``write`` saves the result."""

    source: Source
    seq_len: int
    ends: Int64s
    """End of each document [documents]."""
    rows: Rows

    def as_json(self) -> dict[str, Any]:
        """Return the sequences, padding and cut documents of concat and best-fit."""
        n = self.source.n_tokens
        documents = int(self.ends.size)
        rows = self.rows.starts.size - 1
        return {
            "source": self.source.where,
            "seq_len": self.seq_len,
            "documents": documents,
            "tokens": n,
            "concat_sequences": n_sequences(n, self.seq_len),
            "concat_cut_frac": n_cut_by_chopping(self.ends, self.seq_len) / documents,
            "best_fit_sequences": rows,
            "best_fit_cut_frac": self._n_cut / documents,
            "best_fit_padding_frac": 1 - n / (rows * self.seq_len),
            "pieces": int(self.rows.begins.size),
            "pieces_per_sequence": self.rows.begins.size / rows,
        }

    def write(self) -> PackRecord:
        """Write ``packs/SEQ_LEN`` into the source's folder; replaces an older index when the new one is complete."""
        return write_index(
            self.source,
            self.rows,
            seq_len=self.seq_len,
            n_documents=int(self.ends.size),
            n_cut_documents=self._n_cut,
            folder=pack_folder(self.source.where, self.seq_len),
        )

    @property
    def _n_cut(self) -> int:
        return int((np.diff(self.ends, prepend=0) > self.seq_len).sum())


def pack_source(source: Source, seq_len: int) -> Packing:
    """Pack a source. Raises UserError for a folder that is not local, or without an end-of-document token."""
    if "://" in source.where:
        raise UserError(f"an index cannot be written to {source.where}", allowed="a local folder of tokens")
    if not 2 <= seq_len <= MAX_SEQ_LEN:
        raise UserError(f"--seq-len {seq_len} is out of range", allowed=f"2 to {MAX_SEQ_LEN:,}")
    if source.eod_id is None:
        raise UserError(
            f"{source.where} has no end-of-document token, so documents cannot be separated",
            allowed="tokens with an end-of-document token",
            hint="data.packing=concat needs none",
        )
    ends = document_ends(source, source.eod_id)
    return Packing(source, seq_len, ends, pack(ends, seq_len))
