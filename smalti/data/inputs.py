"""What a run reads, checked before anything is started: manifests only, no token is read.

Promises: sources and held-out sets exist, are long enough, come from one tokenizer, fit the model's vocabulary, and the
tokenizer that the run names is the one that wrote them. Does not look into the token files (the stream does).
"""

from dataclasses import dataclass

from smalti.base.errors import DataError, UserError
from smalti.config.run import RunConfig
from smalti.data.pack import n_sequences
from smalti.data.tokenizer.identity import check_folder
from smalti.data.tokens.manifest import Manifest


@dataclass(frozen=True)
class Inputs:
    """The manifests of a run, by name."""

    sources: dict[str, Manifest]
    heldout: dict[str, Manifest]


def check_inputs(config: RunConfig) -> Inputs:
    """Raise a DataError or UserError for anything that does not fit; returns the manifests."""
    inputs = Inputs(_manifests(config, "sources"), _manifests(config, "heldout"))
    _one_tokenizer(inputs)
    for name, manifest in {**inputs.heldout, **inputs.sources}.items():
        if manifest.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size={config.model.vocab_size} is smaller than the {manifest.vocab_size} of the "
                f"tokenizer that wrote '{name}'",
                allowed=f"at least {manifest.vocab_size}",
                hint=f"model.vocab_size={-(-manifest.vocab_size // 64) * 64}",
            )
    if config.data.tokenizer is not None:
        check_folder(config.data.tokenizer, next(iter(inputs.sources.values())).tokenizer_digest)
    return inputs


def _manifests(config: RunConfig, section: str) -> dict[str, Manifest]:
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


def _one_tokenizer(inputs: Inputs) -> None:
    """All token files of a run must come from one tokenizer."""
    named = [("sources", inputs.sources), ("heldout", inputs.heldout)]
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
