"""The runs of a comparison: one recipe, versions of a set, several seeds; and their loss curves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict, load
from smalti.config.run import RunConfig
from smalti.config.show import dump
from smalti.config.yaml_lines import parse
from smalti.data.documents.heldout import HELDOUT, TRAIN
from smalti.data.prepare.tokenize import TOKENIZER_FOLDER
from smalti.data.tokens.manifest import FILE_NAME, Manifest
from smalti.track.run import RunFolder

POINTS = 16
"""Points of a loss curve, about: they are whole steps apart."""
_EVAL_TOKENS = 32_768
_SET_HERE = ("name", "folder", "seed", "init_from", "data.sources", "data.heldout", "data.stages", "data.tokenizer",
             "train.duration")  # fmt: skip
_INSTEAD = {"seed": "--seeds", "train.duration": "--tokens", "data.tokenizer": "--tokenizer"}
_CHOSEN = ("train.schedule", "train.eval_every", "train.eval_tokens", "train.checkpoint")
"""Sections of the recipe that are replaced unless they are on the command line."""


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share."""

    model: str
    """A recipe of ``smalti train``."""
    overrides: tuple[str, ...]
    tokens: int
    """Training tokens of each run."""
    seeds: int

    def base(self) -> RunConfig:
        """Return the recipe with the overrides. Raises UserError for one that the comparison sets itself."""
        for override in self.overrides:
            key = override.partition("=")[0]
            name = next((name for name in _SET_HERE if re.fullmatch(rf"{re.escape(name)}(\..*)?", key)), None)
            if name is not None:
                raise UserError(
                    f"{override}: '{name}' is set by the comparison, for all versions",
                    allowed="changes to the model, data.seq_len and the training",
                    hint=_INSTEAD.get(name, "leave it out"),
                )
        config = load(RunConfig, self.model, self.overrides, complete=self._check).config
        self._check(dict(config))  # of a run folder, where nothing is completed
        steps = self.tokens // config.train.global_batch_tokens
        if steps < POINTS:
            raise UserError(
                f"--tokens {self.tokens:,} are {steps} steps of {config.train.global_batch_tokens:,} tokens",
                allowed=f"at least {POINTS} steps, the points of the loss curves",
                hint=f"--tokens {POINTS * config.train.global_batch_tokens}",
            )
        return config

    def _check(self, values: Mapping[str, Any], _: object = None) -> tuple[dict[str, Any], str]:
        """Raise UserError for a recipe that does not train a model from the start; there is nothing to add to it."""
        for what in ("tune", "adapter", "init_from"):
            if values.get(what) is not None:
                raise UserError(
                    f"{self.model} has '{what}': the comparison trains a model from the start",
                    allowed="a recipe for training on documents",
                    hint="--model demo",
                )
        return {}, ""

    def config(self, folder: Path, version: str, seed: int) -> RunConfig:
        """Return the config of a run, of the token files in ``folder``.

        The learning rate is constant after the warmup of the recipe, so that the loss after some tokens is that of a
        run of this length.
        """
        base, tokens = self.base(), folder / "tokens"
        values: dict[str, Any] = parse(dump(base), self.model).value
        size = vocab_size(tokens)
        data = values["data"] | {
            "tokenizer": str(tokens / TOKENIZER_FOLDER),
            "sources": {version: str(tokens / version / TRAIN)},
            "heldout": heldout_folders(tokens, base.data.seq_len),
            "stages": [{"weights": {version: 1.0}}],
        }
        train = values["train"] | {
            "duration": f"{self.tokens // base.train.global_batch_tokens}step",
            "schedule": {"warmup": base.train.schedule.warmup, "decay": "0step"},
            "eval_every": f"{1 / POINTS}run",
            "eval_tokens": _EVAL_TOKENS,
            "checkpoint": {"every": "0.25run", "keep": 1},
        }
        values |= {
            "name": f"{folder.name}-{version}-{seed}",
            "folder": str(run_folder(folder, version, seed)),
            "seed": seed,
            "model": values["model"] | {"vocab_size": -(-size // 64) * 64},
            "data": data,
            "train": train,
            "chaos": None,
            "evals": None,
        }
        chosen = [override for override in self.overrides if override.startswith(tuple(f"{key}." for key in _CHOSEN))]
        typed = [override for override in self.overrides if override.startswith(tuple(f"{key}=" for key in _CHOSEN))]
        return from_dict(RunConfig, values, self.model, [*typed, *chosen]).config


def run_folder(folder: Path, version: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / "runs" / f"{version}-{seed}"


def vocab_size(tokens: Path) -> int:
    """Return the size of the vocabulary of token files."""
    return max(_manifest(path.parent).vocab_size for path in tokens.glob(f"*/{TRAIN}/{FILE_NAME}"))


def train_tokens(tokens: Path, version: str) -> int:
    """Return the training tokens that are there of a version."""
    return _manifest(tokens / version / TRAIN).n_tokens


def heldout_folders(tokens: Path, seq_len: int) -> dict[str, str]:
    """Return the held-out sets that have a sequence. DataError if there is none."""
    folders = {path.parent.name: path for path in sorted(tokens.glob(f"*/{HELDOUT}"))}
    sizes = {name: _manifest(path).n_tokens for name, path in folders.items()}
    if not any(size > seq_len for size in sizes.values()):
        raise DataError(
            "the held-out sets are shorter than a sequence: "
            + ", ".join(f"{name} has {size:,} tokens" for name, size in sizes.items()),
            allowed=f"more than data.seq_len={seq_len} tokens",
            hint="a larger heldout_frac in the recipe of all versions, or --heldout FOLDER with more text",
        )
    return {name: str(path) for name, path in folders.items() if sizes[name] > seq_len}


def is_done(folder: Path) -> bool:
    """Return whether a run has come to its end."""
    return (folder / "config.yaml").is_file() and RunFolder(folder).status().get("state") == "done"


def curve(folder: Path, heldout: Sequence[str]) -> dict[str, Any]:
    """Return tokens and, by held-out set, bits per byte of each evaluation of a finished run."""
    rows: dict[int, dict[str, Any]] = {}
    for row in RunFolder.read(folder).metrics():
        rows[row["step"]] = rows.get(row["step"], {}) | row
    keys = {name: f"metrics/eval/{name}/bits_per_byte" for name in heldout}
    config = RunFolder.read(folder).config()
    points = [rows[step] for step in sorted(rows) if step and all(key in rows[step] for key in keys.values())]
    return {
        "tokens": [config.length.tokens(row["step"]) for row in points],
        "bits_per_byte": {name: [row[key] for row in points] for name, key in keys.items()},
    }


def curves(
    folder: Path, versions: Sequence[str], seeds: int, heldout: Sequence[str]
) -> Mapping[str, list[dict[str, Any]]]:
    """Return the curves of all runs: version -> one for each seed."""
    return {
        version: [curve(run_folder(folder, version, seed), heldout) for seed in range(seeds)] for version in versions
    }


def _manifest(folder: Path) -> Manifest:
    path = folder / FILE_NAME
    return Manifest.parse(path.read_bytes(), str(path))
