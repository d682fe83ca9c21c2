"""Cuts sequences from the tokens of a source: by chopping (``concat``) or in whole documents (``best_fit``)."""

from smalti.data.pack.concat import IGNORE, n_sequences, split

__all__ = ["IGNORE", "n_sequences", "split"]
