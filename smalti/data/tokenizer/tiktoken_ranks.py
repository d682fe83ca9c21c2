"""Reads tiktoken rank files (``base64 rank`` on each line) and converts ranks to merges.

A rank file has neither the split expression nor the special tokens; those of published files are known by their size.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError, missing_extra
from smalti.config.curate import SplitPattern
from smalti.data.tokenizer.patterns import EOD, KNOWN_RANKS, KnownRanks, byte_symbols
from smalti.data.tokenizer.train import empty_bpe

Ranks = dict[bytes, int]


def read_ranks(path: str | Path) -> Ranks:
    """Read token bytes -> rank (= id), 0 to n-1. DataError with file and line if it is not a rank file."""
    ranks: Ranks = {}
    for number, line in enumerate(store.read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            token = base64.b64decode(parts[0], validate=True)
            rank = int(parts[1])
            if len(parts) != 2 or not token or token in ranks or rank != len(ranks):
                raise ValueError
        except (ValueError, IndexError, binascii.Error):
            raise DataError(
                f"{path}:{number}: {line[:60]!r} is not line {len(ranks)} of a tiktoken rank file",
                allowed="a token in base64, a blank, and its rank, counting up from 0",
                hint="give a tokenizer.json, a folder with one, or a .tiktoken file",
            ) from None
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path} is not a complete rank file: it has no token for the byte 0x{missing[0]:02x}")
    return ranks


def known_or_given(path: str | Path, n_ranks: int, pattern: SplitPattern | None) -> KnownRanks:
    """Return expression and special tokens of a rank file. UserError if its size is unknown and ``pattern`` is None."""
    known = KNOWN_RANKS.get(n_ranks)
    if known is not None:
        if pattern is not None and pattern != known.pattern:
            raise UserError(f"pattern={pattern} does not fit {path}: {n_ranks} ranks belong to '{known.pattern}'")
        return known
    if pattern is None:
        raise UserError(
            f"{path} has {n_ranks} ranks, a size that does not tell how text is split into words",
            allowed=f"pattern of gpt2, cl100k, o200k; known sizes: {', '.join(map(str, KNOWN_RANKS))}",
            hint="pattern=cl100k",
        )
    return KnownRanks(pattern, EOD, {EOD: n_ranks})


def tokenizer_from_ranks(ranks: Ranks, known: KnownRanks) -> Any:
    """Return a ``tokenizers.Tokenizer`` with the ids of tiktoken. DataError if the ranks are not those of a BPE."""
    try:
        from tokenizers import AddedToken, models
    except ImportError as error:
        raise missing_extra("tokenizers", "data", "reading a rank file", error) from error
    symbols = byte_symbols()

    def printable(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    merges = [(printable(left), printable(right)) for left, right in merges_of(ranks)]
    # tiktoken looks up a whole word before it merges bytes; so does ignore_merges.
    model = models.BPE(
        vocab={printable(token): rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True
    )
    tokenizer = empty_bpe(known.pattern, model)
    names = {rank: token for token, rank in known.special_tokens.items()}
    added = [names.get(rank, f"<|unused_{rank}|>") for rank in range(len(ranks), max(names) + 1)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Return the pair from which each longer token was merged: its bytes after all earlier merges."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        if len(token) == 1:
            continue
        parts = _merge_below(token, ranks, rank)
        if len(parts) != 2:
            raise DataError(f"rank {rank} ({token!r}) is not the merge of two earlier tokens: not the ranks of a BPE")
        merges.append((parts[0], parts[1]))
    return merges


def _merge_below(token: bytes, ranks: Ranks, limit: int) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
