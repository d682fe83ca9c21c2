"""Tokenized examples for tuning (``smalti/data/examples``)."""

from smalti.data.examples.folder import RECORD_NAME, ExamplesRecord, check_files
from smalti.data.examples.source import ExampleSource
from smalti.data.sources.readers.index import Index, SourceFolder


def read_index(folder: SourceFolder) -> Index:
    """Read the record, and check all files: they are read through memory maps."""
    record = ExamplesRecord.parse(folder.index_file, f"{folder.files.where}/{RECORD_NAME}")
    check_files(folder.files.where, record)
    return Index("examples", {}, {RECORD_NAME: folder.index_file})


def open_source(folder: SourceFolder, index: Index) -> ExampleSource:
    """Open the source from what ``read_index`` returned."""
    where = folder.files.where
    return ExampleSource(where, ExamplesRecord.parse(index.parts[RECORD_NAME], f"{where}/{RECORD_NAME}"))
