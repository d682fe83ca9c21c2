"""The digest of a tokenizer. Its files are read as plain JSON, so that training needs no tokenizers package."""

from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json

_DECIDES_IDS = ("type", "vocab", "merges", "ignore_merges", "byte_fallback", "unk_token")
_ALLOWED = "the tokenizer/ folder beside the token files"
_HINT = "data.tokenizer=OUTPUT/tokenizer, with OUTPUT of 'smalti data tokenize'"


def digest_of(parts: dict[str, Any], eod_id: int) -> str:
    """Hex SHA-256 of all that decides ids (vocabulary, merges, split, added tokens) and of the end-of-document id.

    ``parts`` is the content of a ``tokenizer.json`` as the tokenizers package writes it.
    """
    model = {key: parts["model"].get(key) for key in _DECIDES_IDS}
    added = [[token["id"], token["content"], token["special"]] for token in parts["added_tokens"]]
    steps = [parts.get("normalizer"), parts.get("pre_tokenizer")]
    return digest_json({"model": model, "added": added, "steps": steps, "eod_id": eod_id})


def digest_in(folder: str | Path) -> str:
    """Digest of the tokenizer that ``Tokenizer.save`` wrote to ``folder``."""
    parts = store.read_json(store.join(folder, "tokenizer.json"))
    config = store.read_json(store.join(folder, "tokenizer_config.json"))
    try:
        ids = {**parts["model"]["vocab"], **{token["content"]: token["id"] for token in parts["added_tokens"]}}
        return digest_of(parts, ids[config["eos_token"]])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder} has no tokenizer that 'smalti data tokenize' wrote: {error!r} is missing",
            hint=_HINT,
        ) from error


def check_folder(folder: str | Path, tokenizer_digest: str) -> None:
    """Raise DataError unless ``folder`` has the tokenizer with this digest, which wrote the tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not store.exists(store.join(folder, name)):
            raise DataError(f"data.tokenizer = {folder}: there is no {name} in it", allowed=_ALLOWED, hint=_HINT)
    digest = digest_in(folder)
    if digest != tokenizer_digest:
        raise DataError(
            f"data.tokenizer = {folder} is another tokenizer ({digest[:12]}) than wrote the tokens "
            f"({tokenizer_digest[:12]})",
            allowed=_ALLOWED,
            hint=_HINT,
        )
