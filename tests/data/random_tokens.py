"""Small token folders for the tests of the stream."""

from pathlib import Path

import numpy as np

from smalti.config.data import DataConfig
from smalti.data.tokens import Manifest, TokenWriter

TOKENIZER = "ab" * 32
EOD = 0


def write_source(folder: Path, n_documents: int, *, seed: int = 0, vocab_size: int = 512, **kwargs: object) -> Manifest:
    """Random documents of 1 to 79 tokens."""
    rng = np.random.default_rng(seed)
    options = {"eod_id": EOD, "tokenizer_digest": TOKENIZER, "salt": f"{seed:016x}", **kwargs}
    with TokenWriter(folder, vocab_size=vocab_size, **options) as writer:
        for _ in range(n_documents):
            ids = rng.integers(1, vocab_size, rng.integers(1, 80))
            writer.add(ids, 4 * ids.size)
    return Manifest.load(folder)


def config(root: Path, stages: list[dict[str, object]], *, seq_len: int = 16, **kwargs: object) -> DataConfig:
    """A config over the sources that the stages name, each in its folder below ``root``."""
    names = {name for stage in stages for name in stage["weights"]}
    return DataConfig(
        sources={name: str(root / name) for name in sorted(names)}, seq_len=seq_len, stages=stages, **kwargs
    )
