"""A folder of tokens on the command line: what is said of it, as a source's section of a config says it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.data.sources.source import Source

Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FIELD=VALUE]...", help="What a source may say of itself: format=mds, eod_id=0."),
]
TokenizerOfText = Annotated[
    str | None, typer.Option("--tokenizer", help="For text, which is tokenised as it is read: the folder of one.")
]


def open_folder(folder: str, fields: Sequence[str], tokenizer: str | None) -> "Source":
    """The source that a config with these fields would name."""
    from smalti.config.data import FetchConfig, SourceConfig
    from smalti.config.load import from_dict
    from smalti.data.sources.sources import open_source, read_index

    config, fetch = from_dict(SourceConfig, {"path": folder}, "the source", fields).config, FetchConfig()
    return open_source(config, read_index(config, fetch, tokenizer=tokenizer), fetch, tokenizer=tokenizer)
