"""Token data sets of trillions of tokens that take no room: sparse files, with valid bytes only where they are read.

Sizes of files, manifest and its digest are those of a real data set; the SHA-256 of the files are made up (nothing but
``verify`` reads them), and headers and blocks exist only where ``fill`` has been told that they will be read.
"""

import hashlib
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smalti.data.tokens import format as layout
from smalti.data.tokens.manifest import Manifest, file_name, join_digests

FILE_TOKENS = 1 << 28
VOCAB_SIZE = 100_352


def sparse_tokens(folder: Path, n_tokens: int, *, file_tokens: int = FILE_TOKENS) -> Manifest:
    """A folder that says it holds ``n_tokens`` u32 tokens: manifest, and files of the right size without content."""
    folder.mkdir(parents=True)
    n_files = -(-n_tokens // file_tokens)
    manifest = Manifest(
        format=2,
        dtype="u32",
        n_tokens=n_tokens,
        n_documents=n_tokens // 800,
        n_text_bytes=4 * n_tokens,
        eod_id=0,
        vocab_size=VOCAB_SIZE,
        tokenizer_digest="c" * 64,
        salt=secrets.token_hex(8),
        file_tokens=file_tokens,
        sha256=join_digests([hashlib.sha256(b"%d" % number).hexdigest() for number in range(n_files)]),
    ).with_digest()
    manifest.save(folder)
    for number in range(n_files):
        with (folder / file_name(number)).open("wb") as file:
            file.truncate(manifest.bytes_of_file(number))
    return manifest


def fill(folder: Path, manifest: Manifest, begins: npt.NDArray[np.int64], length: int) -> None:
    """Make the blocks under tokens [begin, begin + length) valid, for each of ``begins``."""
    per_block, blocks_per_file = layout.PAYLOAD_BYTES // manifest.token_bytes, manifest.blocks_per_file
    random = np.random.default_rng(0)
    for begin in begins.tolist():
        for number in _blocks(manifest, begin, begin + length):
            file, block = divmod(number, blocks_per_file)
            n = min(per_block, manifest.tokens_of_file(file) - block * per_block)
            tokens = random.integers(1, manifest.vocab_size, n, dtype=np.uint32)
            tokens[:: max(1, n // 2)] = manifest.eod_id
            packed = layout.pack_blocks(
                tokens,
                eod_id=manifest.eod_id,
                before=(file * manifest.file_tokens + block * per_block) // 800,
                salt=int(manifest.salt, 16),
                first_block=number,
            )
            with (folder / file_name(file)).open("r+b") as out:
                out.write(layout.pack_header(manifest.header_of_file(file)))
                out.seek(layout.block_start(block))
                out.write(packed.tobytes())


def _blocks(manifest: Manifest, begin: int, end: int) -> list[int]:
    """Numbers of the blocks under these tokens, counted through all files."""
    per_block = layout.PAYLOAD_BYTES // manifest.token_bytes
    found = []
    while begin < end:
        file, inside = divmod(begin, manifest.file_tokens)
        block = inside // per_block
        found.append(file * manifest.blocks_per_file + block)
        begin = file * manifest.file_tokens + min((block + 1) * per_block, manifest.tokens_of_file(file))
    return found
