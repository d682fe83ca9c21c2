"""Arguments that several verbs of ``smalti data`` share, and the source that a folder argument names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.data.sources.source import Source

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A .yaml file, or the name of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the config.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FIELD=VALUE]...", help="Fields of a source in a config: format=mds, eod_id=0."),
]
TextTokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder of the tokenizer, for documents that are still text.")
]


def open_folder(folder: str, fields: Sequence[str], tokenizer: str | None) -> "Source":
    """Open the source that a config with this path and these fields names."""
    from smalti.config.data import FetchConfig, SourceConfig
    from smalti.config.load import from_dict
    from smalti.data.sources.open import open_source, read_index

    config = from_dict(SourceConfig, {"path": folder}, "the source", fields).config
    fetch = FetchConfig()
    return open_source(config, read_index(config, fetch, tokenizer=tokenizer), fetch, tokenizer=tokenizer)
