"""Weights that a run reads on every attempt and never trains: the base of adapters, a live reference, a teacher.

A checkpoint records the digest of their files (``base`` and ``teacher`` in ``train_state.json``): they must be the same
on every attempt.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.config.run import JobConfig, RunConfig
from smalti.distributed.checkpoint.base import identity, is_model_folder, require_same
from smalti.distributed.group import world as worlds
from smalti.track.checkpoints import manifest
from smalti.track.registry.facts import RECORD
from smalti.train.weights import find_checkpoint

Identities = dict[str, dict[str, str]]
"""``base`` or ``teacher`` -> where the weights are, and their digest."""


def check(config: JobConfig, path: str | None) -> Identities:
    """Return the identities of these weights, for the checkpoints of this run. A collective.

    DataError if the checkpoint at ``path``, from which the run resumes, was trained beside others; without one, if the
    adapter in ``adapter.init_from`` was.
    """
    if not isinstance(config, RunConfig) or not config.frozen_origins:
        return {}
    identities = {name: _identity_of(source) for name, source in config.frozen_origins.items()}
    worlds.together(lambda: require_recorded(config, path, identities))
    return identities


def _identity_of(source: str) -> dict[str, str]:
    is_folder = worlds.broadcast_from_rank0(lambda: is_model_folder(source))
    path = source if is_folder else find_checkpoint(source)
    return worlds.broadcast_from_rank0(lambda: identity(path, source))


def require_recorded(config: RunConfig, path: str | None, identities: Mapping[str, dict[str, str]]) -> None:
    """Raise DataError where ``check`` does."""
    if path is not None:
        require_saved(manifest.read_state(path), path, identities)
    elif config.adapter is not None and config.adapter.init_from is not None:
        file = Path(config.adapter.init_from) / RECORD
        recorded = store.read_json(file).get("base", {}) if file.is_file() else {}
        if recorded.get("kind") == identities["base"]["kind"]:  # a folder never equals a checkpoint
            require_same(recorded, identities["base"], f"the adapters in {config.adapter.init_from} were")


def require_saved(saved: Mapping[str, Any], path: str, identities: Mapping[str, dict[str, str]]) -> None:
    """Raise DataError where the ``train_state`` of the checkpoint at ``path`` records other weights."""
    for name in identities.keys() & saved.keys():  # earlier versions recorded the base of adapters only
        require_same(saved[name], identities[name], f"the weights in {path} were")
