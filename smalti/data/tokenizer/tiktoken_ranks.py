"""tiktoken rank files (``base64 rank`` on each line), and the way back and forth between ranks and merges.

A rank file holds neither the split expression nor the special tokens; for the published ones both are known by size.
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
    """Token bytes -> rank (= id), 0 to n-1. DataError names file and line when it is not a rank file."""
    ranks: Ranks = {}
    for number, line in enumerate(store.read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
            if len(parts) != 2 or not token or token in ranks or rank != len(ranks):
                raise ValueError
        except (ValueError, IndexError, binascii.Error):
            raise DataError(
                f"{path}:{number}: {line[:60]!r} is not line {len(ranks)} of a tiktoken rank file",
                allowed="a token in base64, a blank, and its rank, counting up from 0",
                hint="give a tokenizer.json, a folder that holds one, or a .tiktoken file",
            ) from None
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path} is not a whole rank file: it has no token for the byte 0x{missing[0]:02x}")
    return ranks


def known_or_given(path: str | Path, n_ranks: int, pattern: SplitPattern | None) -> KnownRanks:
    """Expression and special tokens for a rank file. UserError when its size says nothing and no pattern is given."""
    known = KNOWN_RANKS.get(n_ranks)
    if known is not None:
        if pattern is not None and pattern != known.pattern:
            raise UserError(f"pattern={pattern} does not fit {path}: {n_ranks} ranks belong to '{known.pattern}'")
        return known
    if pattern is None:
        raise UserError(
            f"{path} holds {n_ranks} ranks, which tells nothing about how its text is cut into words",
            allowed=f"pattern of gpt2, cl100k, o200k; known sizes: {', '.join(map(str, KNOWN_RANKS))}",
            hint="pattern=cl100k",
        )
    return KnownRanks(pattern, EOD, {EOD: n_ranks})


def tokenizer_from_ranks(ranks: Ranks, known: KnownRanks) -> Any:
    """A ``tokenizers.Tokenizer`` that gives the ids of tiktoken. DataError when the ranks are not those of a BPE."""
    try:
        from tokenizers import AddedToken, models
    except ImportError as error:
        raise missing_extra("tokenizers", "data", "reading a rank file", error) from error
    symbols = byte_symbols()

    def shown(token: bytes) -> str:
        return "".join(symbols[byte] for byte in token)

    merges = [(shown(left), shown(right)) for left, right in merges_of(ranks)]
    # tiktoken looks a whole piece up before it merges anything; ignore_merges is that rule.
    model = models.BPE(vocab={shown(token): rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)
    tokenizer = empty_bpe(known.pattern, model)
    names = {rank: token for token, rank in known.special_tokens.items()}
    added = [names.get(rank, f"<|unused_{rank}|>") for rank in range(len(ranks), max(names) + 1)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The pair that each longer token was merged from: what is left of its bytes when all earlier merges are done."""
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
