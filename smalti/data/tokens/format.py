"""Encodes and checks the header and the blocks of a token file (``*.tok``).

docs/concepts/data/token-files.md specifies every byte; docs/decisions/0012 gives the reasons. Each block has its own
checksum, so one ranged read is enough to verify it; a block of another place, file, version or data set fails like a
damaged one. The checksums do not protect against an adversary; the manifest's SHA-256 does.
"""

import struct
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError
from smalti.base.hashing import xxh3, xxh3_digest

MAGIC = b"SMALTITK"
VERSION = 2
HEADER_BYTES = 4096
BLOCK_BYTES = 8192
CHECKSUM_BYTES = 8
PAYLOAD_BYTES = BLOCK_BYTES - 16
HASHED_BYTES = BLOCK_BYTES - CHECKSUM_BYTES

_FIELDS = struct.Struct("<8sIIQQq32sQQ")
_SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of all blocks of a data set differ."""
_HINT = "copy the file again from where it was written, or run 'smalti data tokenize' again"


@dataclass(frozen=True)
class Header:
    """The header of a token file."""

    token_bytes: int
    """2 (u16) or 4 (u32)."""
    n_tokens: int
    eod_id: int
    tokenizer_digest: str
    """Hex SHA-256 of the tokenizer that made the tokens."""
    salt: int
    """u64, the same in all files of a data set and in no other."""
    file: int
    """Number of the file in its data set."""


def token_bytes_for(vocab_size: int) -> int:
    """Return the width of a token on disk: 2 bytes up to a vocabulary of 65,536, else 4."""
    return 2 if vocab_size <= 65_536 else 4


def block_dtype(token_bytes: int) -> "np.dtype[np.void]":
    """Return the dtype of a block: ``tokens``, ``before`` (documents that end before it), ``checksum``."""
    tokens = (f"<u{token_bytes}", (PAYLOAD_BYTES // token_bytes,))
    return np.dtype([("tokens", *tokens), ("before", "<u8"), ("checksum", ">u8")])


def n_blocks(n_tokens: int, token_bytes: int) -> int:
    """Return the number of blocks for ``n_tokens`` tokens; the last one may be padded with zeros."""
    return -(-n_tokens * token_bytes // PAYLOAD_BYTES)


def file_bytes(n_tokens: int, token_bytes: int) -> int:
    """Return the size of a file of ``n_tokens`` tokens."""
    return HEADER_BYTES + n_blocks(n_tokens, token_bytes) * BLOCK_BYTES


def block_start(block: int) -> int:
    """Return the offset of a block in its file, in bytes."""
    return HEADER_BYTES + block * BLOCK_BYTES


def pack_header(header: Header) -> bytes:
    """Encode the header of a file, 4096 bytes."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.token_bytes,
        BLOCK_BYTES,
        header.n_tokens,
        header.eod_id,
        bytes.fromhex(header.tokenizer_digest),
        header.salt,
        header.file,
    )
    body = fields.ljust(HEADER_BYTES - CHECKSUM_BYTES, b"\0")
    return body + struct.pack("<Q", xxh3(body))


def unpack_header(data: bytes, file: str) -> Header:
    """Decode and check a header. Raises DataError, which names ``file``."""
    if len(data) < HEADER_BYTES:
        raise DataError(f"{file} is truncated: {len(data):,} bytes, a header has {HEADER_BYTES:,}", hint=_HINT)
    if data[: len(MAGIC)] != MAGIC:
        raise DataError(f"{file} is not a token file: it begins with {data[: len(MAGIC)]!r}", allowed=f"{MAGIC!r}")
    body = data[: HEADER_BYTES - CHECKSUM_BYTES]
    if struct.unpack("<Q", data[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES])[0] != xxh3(body):
        raise DataError(f"{file} is corrupt: the checksum of its header does not match", hint=_HINT)
    _, version, token_bytes, block_bytes, n_tokens, eod_id, tokenizer, salt, number = _FIELDS.unpack_from(body)
    if version != VERSION or block_bytes != BLOCK_BYTES or token_bytes not in (2, 4):
        raise DataError(
            f"{file} has format version {version}, {token_bytes} bytes per token, blocks of {block_bytes:,} bytes",
            allowed=f"version {VERSION}, 2 or 4 bytes per token, blocks of {BLOCK_BYTES:,} bytes",
            hint="write the tokens again with 'smalti data tokenize' of this version",
        )
    return Header(token_bytes, n_tokens, eod_id, tokenizer.hex(), salt, number)


def check_header(header: Header, expected: Header, file: str) -> None:
    """Compare a file's header with the one that the manifest implies. Raises DataError with the first difference."""
    for field in fields(Header):
        value = getattr(header, field.name)
        expected_value = getattr(expected, field.name)
        if value != expected_value:
            raise DataError(
                f"{file} is not the file that the manifest lists: its {field.name} is {value}, not {expected_value}",
                hint=_HINT,
            )


def seeds(salt: int, blocks: npt.NDArray[np.int64]) -> list[int]:
    """Return the checksum seeds of blocks, given by number counted through all files of the data set."""
    values: list[int] = (blocks.astype(np.uint64) * np.uint64(_SPREAD) + np.uint64(salt)).tolist()
    return values


def pack_blocks(
    tokens: npt.NDArray[np.unsignedinteger], *, eod_id: int, before: int, salt: int, first_block: int
) -> npt.NDArray[np.void]:
    """Encode tokens [n] as whole blocks, the last one padded with zeros.

    ``before``: documents that end before the first of these blocks; ``first_block``: its number, counted through all
    files of the data set.
    """
    width = tokens.dtype.itemsize
    blocks = np.zeros(n_blocks(tokens.size, width), block_dtype(width))
    size = PAYLOAD_BYTES // width
    whole = tokens.size // size
    blocks["tokens"][:whole] = tokens[: whole * size].reshape(whole, size)
    blocks["tokens"][whole:, : tokens.size - whole * size] = tokens[whole * size :]
    ends = np.flatnonzero(tokens == eod_id) // size
    blocks["before"] = before + np.searchsorted(ends, np.arange(len(blocks)))
    digests = checksums(blocks.data.cast("B"), seeds(salt, first_block + np.arange(len(blocks))))
    blocks["checksum"] = np.frombuffer(digests, ">u8")
    return blocks


def checksums(blocks: memoryview, seeds_of_blocks: list[int]) -> bytes:
    """Compute the checksums of whole blocks, concatenated; the checksum field of each block must equal its own."""
    starts = range(0, len(blocks), BLOCK_BYTES)
    return b"".join(
        [xxh3_digest(blocks[at : at + HASHED_BYTES], seed) for at, seed in zip(starts, seeds_of_blocks, strict=True)]
    )


def wrong_blocks(blocks: memoryview, seeds_of_blocks: list[int]) -> list[int]:
    """Return the indexes of the blocks that do not match their checksum."""
    stored = np.frombuffer(blocks, np.uint64).reshape(-1, BLOCK_BYTES // 8)[:, -1].tobytes()
    computed = checksums(blocks, seeds_of_blocks)
    if computed == stored:
        return []
    return np.flatnonzero(np.frombuffer(computed, np.uint64) != np.frombuffer(stored, np.uint64)).tolist()


def bad_block(file: str, block: int) -> DataError:
    """Return the error for a block that fails its check in every replica."""
    start = block_start(block)
    return DataError(
        f"{file} is corrupt: block {block} (bytes {start:,} to {start + BLOCK_BYTES:,}) does not match its checksum",
        hint=_HINT,
    )


def wrong_size(file: str, n_bytes: int, expected_bytes: int) -> DataError:
    """Return the error for a file of the wrong size."""
    word = "truncated" if n_bytes < expected_bytes else "too long"
    return DataError(f"{file} is {word}: {n_bytes:,} bytes, {expected_bytes:,} expected", hint=_HINT)
