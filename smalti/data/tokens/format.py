"""The layout of one token file (``*.tok``), byte by byte; all numbers little-endian but the checksum.

    0       header, 4096 bytes: magic, version, width of a token, block size, tokens in the file, end-of-document id,
            digest of the tokenizer, salt of the data set, number of the file, zeros, and in the last 8 bytes the
            XXH3-64 of the 4088 before
    4096    blocks of 8192 bytes, each
              0     8176 bytes of tokens, u16 or u32, one after another; after the last token of the file zeros
              8176  u64: documents that end before this block, counted through all files of the data set
              8184  XXH3-64 (big-endian) of the 8184 bytes before, seeded with salt, file and block

Every block has its own checksum, so one ranged read brings all that is needed to verify it; a block of another place,
file, version or data set fails like a damaged one. There is no protection against an adversary (the manifest's SHA-256
is for that). Why: docs/decisions/0012.
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
"""Odd, so that every block of a data set has a seed of its own."""
_HINT = "copy the file again from where it was written, or run 'smalti data tokenize' again"


@dataclass(frozen=True)
class Header:
    """What a token file says about itself."""

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
    """Width of a token on disk: 2 bytes up to a vocabulary of 65,536, else 4."""
    return 2 if vocab_size <= 65_536 else 4


def block_dtype(token_bytes: int) -> "np.dtype[np.void]":
    """A block as a record: ``tokens``, ``before`` (documents that end before it), ``checksum``."""
    tokens = (f"<u{token_bytes}", (PAYLOAD_BYTES // token_bytes,))
    return np.dtype([("tokens", *tokens), ("before", "<u8"), ("checksum", ">u8")])


def n_blocks(n_tokens: int, token_bytes: int) -> int:
    """Blocks that hold ``n_tokens`` tokens, the last one perhaps filled up with zeros."""
    return -(-n_tokens * token_bytes // PAYLOAD_BYTES)


def file_bytes(n_tokens: int, token_bytes: int) -> int:
    """Size of a file of ``n_tokens`` tokens."""
    return HEADER_BYTES + n_blocks(n_tokens, token_bytes) * BLOCK_BYTES


def block_start(block: int) -> int:
    """Where a block begins in its file, in bytes."""
    return HEADER_BYTES + block * BLOCK_BYTES


def pack_header(header: Header) -> bytes:
    """The 4096 bytes that open a file."""
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
    """Read and check a header; ``file`` only names the culprit. Raises DataError."""
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


def agree(found: Header, expected: Header, file: str) -> None:
    """Compare a file's header with what the manifest says of it. Raises DataError with the difference."""
    for field in fields(Header):
        values = getattr(found, field.name), getattr(expected, field.name)
        if values[0] != values[1]:
            raise DataError(
                f"{file} is not the file that the manifest lists: its {field.name} is {values[0]}, not {values[1]}",
                hint=_HINT,
            )


def seeds(salt: int, blocks: npt.NDArray[np.int64]) -> list[int]:
    """Seeds of the checksums of blocks, which are numbered through all files of a data set."""
    found: list[int] = (blocks.astype(np.uint64) * np.uint64(_SPREAD) + np.uint64(salt)).tolist()
    return found


def pack_blocks(
    tokens: npt.NDArray[np.unsignedinteger], *, eod_id: int, before: int, salt: int, first_block: int
) -> npt.NDArray[np.void]:
    """Tokens [n] as whole blocks, the last one filled up with zeros. ``before``: documents that end before the first of
    them; ``first_block``: its number, counted through all files of the data set."""
    width = tokens.dtype.itemsize
    blocks = np.zeros(n_blocks(tokens.size, width), block_dtype(width))
    size = PAYLOAD_BYTES // width
    whole = tokens.size // size
    blocks["tokens"][:whole] = tokens[: whole * size].reshape(whole, size)
    blocks["tokens"][whole:, : tokens.size - whole * size] = tokens[whole * size :]
    ends = np.flatnonzero(tokens == eod_id) // size
    blocks["before"] = before + np.searchsorted(ends, np.arange(len(blocks)))
    found = checksums(blocks.data.cast("B"), seeds(salt, first_block + np.arange(len(blocks))))
    blocks["checksum"] = np.frombuffer(found, ">u8")
    return blocks


def checksums(blocks: memoryview, seeds_of_blocks: list[int]) -> bytes:
    """The checksums of whole blocks of bytes, one after another: what must stand at their ends."""
    starts = range(0, len(blocks), BLOCK_BYTES)
    return b"".join(
        [xxh3_digest(blocks[at : at + HASHED_BYTES], seed) for at, seed in zip(starts, seeds_of_blocks, strict=True)]
    )


def wrong_blocks(blocks: memoryview, seeds_of_blocks: list[int]) -> list[int]:
    """Which of these whole blocks of bytes do not match their checksum; mostly none."""
    stored = np.frombuffer(blocks, np.uint64).reshape(-1, BLOCK_BYTES // 8)[:, -1].tobytes()
    found = checksums(blocks, seeds_of_blocks)
    if found == stored:
        return []
    return np.flatnonzero(np.frombuffer(found, np.uint64) != np.frombuffer(stored, np.uint64)).tolist()


def bad_block(file: str, block: int) -> DataError:
    """The error for a block that fails its check wherever it is read from."""
    start = block_start(block)
    return DataError(
        f"{file} is corrupt: block {block} (bytes {start:,} to {start + BLOCK_BYTES:,}) does not match its checksum",
        hint=_HINT,
    )


def short_file(file: str, found_bytes: int, expected_bytes: int) -> DataError:
    """The error for a file of the wrong size."""
    word = "truncated" if found_bytes < expected_bytes else "too long"
    return DataError(f"{file} is {word}: {found_bytes:,} bytes, {expected_bytes:,} expected", hint=_HINT)
