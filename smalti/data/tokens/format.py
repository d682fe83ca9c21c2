"""The layout of one token file (``*.tok``), byte by byte; all numbers little-endian.

    0        header, 4096 bytes: magic, version, width of a token, block size, tokens, end-of-document id, digest of the
             tokenizer, zeros, and in the last 8 bytes the XXH3-64 of the 4088 before
    4096     tokens, u16 or u32, one after another; seen as blocks of 64 KiB, the last one shorter
    ...      XXH3-64 of each block, u64
    end - 8  XXH3-64 of that table

Promises: every byte that a reader relies on is under a checksum; the file says by itself what it holds; the length of
a sequence is not frozen into it. Does not promise protection against an adversary (the manifest's SHA-256 does that).
"""

import struct
from dataclasses import dataclass

import numpy as np

from smalti.base.errors import DataError
from smalti.base.hashing import xxh3

MAGIC = b"SMALTITK"
VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 65_536
CHECKSUM_BYTES = 8

_FIELDS = struct.Struct("<8sIIQQq32s")
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

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger]":
        """The type of a token on disk."""
        return np.dtype("<u2" if self.token_bytes == 2 else "<u4")

    @property
    def data_bytes(self) -> int:
        """Bytes of all tokens."""
        return self.n_tokens * self.token_bytes

    @property
    def n_blocks(self) -> int:
        """Blocks of 64 KiB, the last one perhaps shorter."""
        return -(-self.data_bytes // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + self.data_bytes + (self.n_blocks + 1) * CHECKSUM_BYTES


def token_bytes_for(vocab_size: int) -> int:
    """Width of a token on disk: 2 bytes up to a vocabulary of 65,536, else 4."""
    return 2 if vocab_size <= 65_536 else 4


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
    _, version, token_bytes, block_bytes, n_tokens, eod_id, tokenizer = _FIELDS.unpack_from(body)
    if version != VERSION or block_bytes != BLOCK_BYTES or token_bytes not in (2, 4):
        raise DataError(
            f"{file} has format version {version}, {token_bytes} bytes per token, blocks of {block_bytes:,} bytes",
            allowed=f"version {VERSION}, 2 or 4 bytes per token, blocks of {BLOCK_BYTES:,} bytes",
            hint="write the tokens again with 'smalti data tokenize' of this version",
        )
    return Header(token_bytes, n_tokens, eod_id, tokenizer.hex())


def pack_checksums(checksums: list[int]) -> bytes:
    """The table that closes a file: one XXH3-64 for each block, and one over the table."""
    table = np.asarray(checksums, dtype="<u8").tobytes()
    return table + struct.pack("<Q", xxh3(table))


def unpack_checksums(
    data: bytes, header: Header, expected: int, file: str
) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The checksums of all blocks, u64 [n_blocks]; ``expected`` is the table's own checksum from the manifest."""
    table = data[:-CHECKSUM_BYTES]
    if len(data) != (header.n_blocks + 1) * CHECKSUM_BYTES:
        raise DataError(f"{file} is truncated inside its table of checksums", hint=_HINT)
    own = struct.unpack("<Q", data[-CHECKSUM_BYTES:])[0]
    if xxh3(table) != own:
        raise DataError(f"{file} is corrupt: its table of block checksums does not match its own checksum", hint=_HINT)
    if own != expected:
        raise DataError(
            f"{file} is not the file that the manifest lists: its blocks add up to {own:016x}, not {expected:016x}",
            hint=_HINT,
        )
    return np.frombuffer(table, dtype="<u8")


def check_block(block: memoryview, checksum: int, file: str, index: int) -> None:
    """Compare one block with its checksum; DataError names file and block."""
    if xxh3(block) != checksum:
        first = HEADER_BYTES + index * BLOCK_BYTES
        raise DataError(
            f"{file} is corrupt: block {index} (bytes {first:,} to {first + len(block):,}) does not match its checksum",
            hint=_HINT,
        )


def short_file(file: str, found_bytes: int, expected_bytes: int) -> DataError:
    """The error for a file of the wrong size."""
    word = "truncated" if found_bytes < expected_bytes else "too long"
    return DataError(f"{file} is {word}: {found_bytes:,} bytes, {expected_bytes:,} expected", hint=_HINT)
