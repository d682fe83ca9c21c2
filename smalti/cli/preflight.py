"""What can be known to be wrong with a run before a process of it starts, and the plan of one that is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_count

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.tokens.manifest import Manifest


@dataclass(frozen=True)
class Checked:
    """The manifests of a run's token folders, all of which fit it."""

    sources: dict[str, "Manifest"]
    heldout: dict[str, "Manifest"]


def check(config: "RunConfig", *, ranks: int) -> Checked:
    """Raise for a mesh that does not fit ``ranks``, missing or foreign tokens, a vocabulary that is too small."""
    replicate = config.train.parallel.replicate
    if ranks % replicate:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise UserError(
            f"train.parallel.replicate={replicate} does not divide the {ranks} ranks",
            allowed=f"a divisor of {ranks}: {', '.join(divisors)}",
            hint="change train.parallel.replicate or train.parallel.ranks",
        )
    if config.init_from is not None and not Path(config.init_from).exists():
        raise DataError(f"init_from = {config.init_from} does not exist", allowed="a checkpoint or Hugging Face folder")
    checked = Checked(_manifests(config, "sources"), _manifests(config, "heldout"))
    _one_tokenizer(checked)
    for name, manifest in {**checked.heldout, **checked.sources}.items():
        if manifest.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size={config.model.vocab_size} is smaller than the {manifest.vocab_size} of the "
                f"tokenizer that wrote '{name}'",
                allowed=f"at least {manifest.vocab_size}",
                hint=f"model.vocab_size={-(-manifest.vocab_size // 64) * 64}",
            )
    return checked


def plan_text(config: "RunConfig", checked: Checked, *, ranks: int) -> str:
    """What would be started, in lines for people."""
    from smalti.plan.budget import budget, epochs_by_source

    numbers = budget(config)
    sizes = {name: manifest.n_tokens for name, manifest in checked.sources.items()}
    epochs = epochs_by_source(config, sizes)
    lines = [
        f"run        {config.name}  ->  {config.run_folder}{_existing(config)}",
        f"model      {config.model.family}, {format_count(numbers.params.total)} parameters, "
        f"{format_count(numbers.params.active)} active",
        f"length     {numbers.steps} steps x {config.train.global_batch_tokens} tokens "
        f"= {format_count(numbers.tokens)} tokens, {format_count(numbers.total_flops)} FLOPs",
        f"placement  {ranks} ranks on {config.train.parallel.device}, replicate {config.train.parallel.replicate}",
    ]
    for name, manifest in checked.sources.items():
        lines.append(f"source     {name}: {format_count(manifest.n_tokens)} tokens, {epochs.get(name, 0.0):.2f} epochs")
    for name, manifest in checked.heldout.items():
        lines.append(f"held out   {name}: {format_count(manifest.n_tokens)} tokens")
    return "\n".join(lines)


def _existing(config: "RunConfig") -> str:
    return "  (exists: would resume)" if (Path(config.run_folder) / "config.yaml").exists() else ""


def _manifests(config: "RunConfig", section: str) -> "dict[str, Manifest]":
    from smalti.data.pack import n_sequences
    from smalti.data.tokens.manifest import Manifest

    found: dict[str, Manifest] = {}
    for name, folder in getattr(config.data, section).items():
        try:
            manifest = Manifest.load(folder)
        except DataError as error:
            raise DataError(
                f"data.{section}.{name} = {folder}: {error.message}", allowed=error.allowed, hint=error.hint
            ) from error
        if n_sequences(manifest.n_tokens, config.data.seq_len) < 1:
            raise DataError(
                f"data.{section}.{name} = {folder} holds {manifest.n_tokens} tokens, less than one sequence",
                allowed=f"more than data.seq_len = {config.data.seq_len} tokens",
                hint="add documents, or lower data.seq_len",
            )
        if section == "heldout" and not manifest.n_text_bytes:
            raise DataError(
                f"data.heldout.{name} = {folder} does not say how many bytes its documents had",
                allowed="held-out tokens with n_text_bytes in their manifest, for bits per byte",
                hint="write them again with 'smalti data tokenize'",
            )
        found[name] = manifest
    return found


def _one_tokenizer(checked: Checked) -> None:
    """All token files of a run must come from one tokenizer."""
    named = [("sources", checked.sources), ("heldout", checked.heldout)]
    all_of_them = [(f"data.{section}.{name}", manifest) for section, found in named for name, manifest in found.items()]
    first_name, first = all_of_them[0]
    for name, manifest in all_of_them[1:]:
        if (manifest.tokenizer_digest, manifest.eod_id) != (first.tokenizer_digest, first.eod_id):
            raise DataError(
                f"{name} was written by another tokenizer ({manifest.tokenizer_digest[:12]}) "
                f"than {first_name} ({first.tokenizer_digest[:12]})",
                allowed="one tokenizer for all token files of a run",
                hint="run 'smalti data tokenize' over all sources together",
            )
