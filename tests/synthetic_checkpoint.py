"""Checkpoints without tensors: files with a manifest and COMPLETE, as a save leaves them."""

from pathlib import Path

from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import complete, folder_name, step_of


def write_checkpoint(folder: Path, step: int, *, n_bytes: int = 100, n_files: int = 2) -> Path:
    """Write the checkpoint of a step below ``folder``: ``n_bytes`` in shards."""
    path = folder / folder_name(step)
    (path / "shards").mkdir(parents=True)
    for number in range(n_files):
        (path / "shards" / f"__{number}_0.distcp").write_bytes(bytes([step % 256]) * (n_bytes // n_files))
    entries = [manifest.entry(path, file) for file in sorted((path / "shards").iterdir())]
    manifest.write(path, {"step": step, "tokens": 8 * step}, entries)
    return path


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    return sorted(map(step_of, complete(folder)))
