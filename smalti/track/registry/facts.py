"""What the registry records about a folder: kind, digest, run, step, tokens, data, scores. Reads files only, no torch.

The digest is cheap: of an export it covers the config, the index, and size and samples of each weight file; of a
checkpoint its manifest, which has the digest of every file. It notices other weights, not a single changed bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json, sha256_bytes, sha256_file
from smalti.config.durations import RunLength
from smalti.track.checkpoints.names import folder_name, is_name
from smalti.track.provenance import redact
from smalti.track.registry.scores import Scores, merged, scores_of

RECORD = "export.json"
"""File of an exported folder that names its run and step."""

Kind = Literal["model", "adapter", "checkpoint"]
_CONFIGS: dict[str, Kind] = {"config.json": "model", "adapter_config.json": "adapter", "train_state.json": "checkpoint"}
"""A file that only a folder of this kind has, and the kind."""
_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Facts:
    """A folder as it is now; None where its run is not known."""

    kind: Kind
    path: str
    """Absolute, without links."""
    digest: str
    run: str | None = None
    run_folder: str | None = None
    step: int | None = None
    tokens: int | None = None
    """Tokens trained on until ``step``."""
    data: dict[str, Any] = field(default_factory=dict)
    """Digests of the data, its past and its tokenizer, as in the checkpoint; path and digest of each source."""
    scores: Scores = field(default_factory=dict)
    weights: str | None = None
    """``moving average`` or ``mean of steps 10, 20``; None: the weights of ``step``."""


def read_facts(folder: str | Path) -> Facts:
    """Return the facts of an export, an adapter or a checkpoint. Raises DataError for any other folder."""
    path = Path(folder).resolve()
    kind = kind_of(path)
    content = digest(path)
    if kind is None or content is None:
        raise _no_model(path)
    if kind == "checkpoint":
        return _with_run(
            Facts(kind, str(path), content), path.parent.parent, store.read_json(path / "train_state.json")
        )
    record = store.read_json(path / RECORD) if (path / RECORD).is_file() else {}
    if not isinstance(record, dict) or not {"run", "run_folder", "step"} <= record.keys():
        return Facts(kind, str(path), content)
    run, step = Path(record["run_folder"]), int(record["step"])
    state = run / "checkpoints" / folder_name(step) / "train_state.json"
    facts = Facts(kind, str(path), content, run=record["run"], step=step, weights=weights_of(record))
    return _with_run(facts, run, store.read_json(state) if state.is_file() else {})


def kind_of(path: Path) -> Kind | None:
    """Return what a folder is; None for anything else."""
    return next((kind for name, kind in _CONFIGS.items() if (path / name).is_file()), None)


def digest(path: Path) -> str | None:
    """Return the digest of a folder's content; None where it is no whole model or checkpoint."""
    kind = kind_of(path)
    if kind == "checkpoint":
        is_whole = (path / "COMPLETE").is_file() and (path / "manifest.json").is_file()
        return sha256_file(path / "manifest.json") if is_whole else None
    weights = sorted(path.glob("*.safetensors"))
    if kind is None or not weights:
        return None
    configs = [file for file in (*(path / name for name in _CONFIGS), *path.glob("*.index.json")) if file.is_file()]
    return digest_json(
        {file.name: sha256_file(file) for file in configs}
        | {file.name: [file.stat().st_size, _samples(file)] for file in weights}
    )


def _samples(file: Path) -> str:
    """Return the digest of blocks spread evenly over a file; the first has the header, at least its beginning."""
    last = max(0, file.stat().st_size - _SAMPLE_BYTES)
    with file.open("rb") as opened:
        blocks = []
        for number in range(_SAMPLES):
            opened.seek(last * number // (_SAMPLES - 1))
            blocks.append(opened.read(_SAMPLE_BYTES))
    return sha256_bytes(b"".join(blocks))


def _with_run(facts: Facts, run: Path, state: Mapping[str, Any]) -> Facts:
    """Add what the run folder and the JSON state of the checkpoint say; each may be missing."""
    config = _config(run)
    if config is None:
        return facts
    step = facts.step if facts.step is not None else state.get("step")
    length = RunLength.of_plain(config)
    tokens = state.get("tokens", length.tokens(step) if length is not None and step is not None else None)
    return Facts(
        facts.kind,
        facts.path,
        facts.digest,
        run=facts.run or str(config.get("name", run.name)),
        run_folder=str(run.resolve()),
        step=step,
        tokens=None if tokens is None else int(tokens),
        data=_data(config, state.get("stream") or {}),
        scores=_scores(run, step, facts.weights),
        weights=facts.weights,
    )


def weights_of(record: Mapping[str, Any]) -> str | None:
    """Return which weights the record of an export says it has; None: those of one checkpoint."""
    steps = record.get("averaged_steps")
    return "moving average" if record.get("ema") else f"mean of steps {', '.join(map(str, steps))}" if steps else None


def _config(run: Path) -> dict[str, Any] | None:
    try:
        value = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return value if isinstance(value, dict) else None


def _data(config: Mapping[str, Any], stream: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("data")
    named = section.get("sources") if isinstance(section, Mapping) else None
    digests = stream.get("sources") or {}
    sources = {}
    for name, source in named.items() if isinstance(named, Mapping) else ():
        path = source.get("path") if isinstance(source, Mapping) else source
        sources[name] = {"path": redact(str(path)), "digest": digests.get(name)}
    known = {"digest": stream.get("data"), "past": stream.get("past"), "tokenizer": stream.get("tokenizer")}
    return {key: value for key, value in (known | {"sources": sources}).items() if value}


def _scores(run: Path, step: int | None, weights: str | None) -> Scores:
    """Return the scores of all evaluations in the run folder of exactly this step and these weights."""
    scores: Scores = {}
    for path in sorted(run.glob("evals/*/*/results.json"), key=lambda path: path.parent.name):
        try:
            results = store.read_json(path)
        except DataError:
            continue
        if not isinstance(results, dict) or step is None:
            continue
        if (results.get("step"), results.get("weights")) == (step, weights):
            scores = merged(scores, scores_of(results))
    return scores


def _no_model(path: Path) -> DataError:
    hint = None
    if (path / "config.yaml").is_file():
        is_exported = (path / "export").is_dir()
        hint = f"smalti models add {path / 'export'}" if is_exported else f"smalti export {path}"
    elif is_name(path.name):
        hint = "a checkpoint without COMPLETE was not written to its end"
    return DataError(
        f"{path} is not a model" if path.exists() else f"there is no folder '{path}'",
        allowed="an export (config.json and safetensors), an adapter in PEFT's format, or a complete checkpoint",
        hint=hint,
    )
