"""Checkpoints of random bytes, as a run saves them, for tests that need no model."""

import random
from pathlib import Path

from smalti.base.hashing import sha256_file
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import folder_name


def checkpoint(
    folder: Path, step: int, *, seed: int = 0, shards: int = 2, shard_bytes: int = 100_000, keep: int = 0, **state: str
) -> Path:
    """Write a complete checkpoint, with ``state`` in its train state; with ``keep``, all but the newest are deleted."""
    chance = random.Random(f"{step} {seed}")
    root = folder / folder_name(step)
    (root / "shards").mkdir(parents=True)
    for number in range(shards):
        (root / "shards" / f"{number:05d}.safetensors").write_bytes(chance.randbytes(shard_bytes))
    entries = [manifest.entry(root, path) for path in sorted((root / "shards").iterdir())]
    manifest.write(root, {"step": step, "seed": seed, **state}, entries)
    if keep:
        from smalti.track.checkpoints.retention import prune

        prune(folder, step, keep)
    return root


def digests(root: Path) -> dict[str, str]:
    """Name -> SHA-256 of every file of a checkpoint."""
    return {str(path.relative_to(root)): sha256_file(path) for path in sorted(root.rglob("*")) if path.is_file()}
