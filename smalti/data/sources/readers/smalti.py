"""Smalti's own token files (``smalti/data/tokens``)."""

from smalti.data.sources.readers.index import Index, SourceFolder, parsed_json
from smalti.data.tokens.manifest import FILE_NAME
from smalti.data.tokens.reader import TokenSource


def read_index(folder: SourceFolder) -> Index:
    """Read the manifest."""
    value = parsed_json(folder.index_file, f"{folder.files.where}/{FILE_NAME}")
    digest = value.get("digest") if isinstance(value, dict) else None
    return Index("smalti", {"digest": digest}, {FILE_NAME: folder.index_file})


def open_source(folder: SourceFolder, index: Index) -> TokenSource:
    """Open the source from what ``read_index`` returned."""
    return TokenSource(folder.files.where, index=index.parts[FILE_NAME], files=folder.files)
