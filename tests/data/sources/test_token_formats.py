"""The table of token formats, and a format added by the recipe of CONTRIBUTING."""

import sys
from importlib import import_module
from types import ModuleType
from typing import get_args

import numpy as np
import pytest

from smalti.config.data import FetchConfig, SourceConfig
from smalti.config.token_formats import FORMATS, FormatName, TokenFormat
from smalti.data.fetch import Range
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.readers.sharded_source import Facts, FlatLayout, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredFile, StoredShards
from smalti.data.tokens import manifest


def test_each_name_has_a_row_and_a_reader() -> None:
    assert get_args(FormatName) == tuple(FORMATS)
    for name, traits in FORMATS.items():
        reader = import_module(f"smalti.data.sources.readers.{name}")
        assert callable(reader.read_index)
        assert callable(reader.open_source)
        assert set(traits.options) <= set(SourceConfig.model_fields)
        assert bool(traits.index_file) != bool(traits.suffixes)
    assert FORMATS["smalti"].index_file == manifest.FILE_NAME


def test_a_format_is_added_by_a_row_and_a_reader(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 8 bytes behind a head of 4."""
    reader = ModuleType("octets")

    def read_names(folder: SourceFolder) -> Index:
        size = folder.files.size("tokens.octets")
        assert bytes(folder.files.read([Range("tokens.octets", 0, 4)])[0]) == b"OCTS"
        return Index("octets", {"bytes": size})

    def open_tokens(folder: SourceFolder, index: Index) -> ShardedSource:
        stored = StoredShards(folder.files, [Shard(StoredFile("tokens.octets", index.facts["bytes"]))])
        n_tokens = np.array([(index.facts["bytes"] - 4) // 8])
        facts = Facts("0" * 64, "nothing", folder.config.vocab_size, folder.config.eod_id)
        return ShardedSource(stored, FlatLayout(np.dtype("<u8"), [4]), n_tokens, facts)

    reader.read_index, reader.open_source = read_names, open_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "smalti.data.sources.readers.octets", reader)
    monkeypatch.setitem(FORMATS, "octets", TokenFormat(("eod_id",), suffixes=(".octets",)))  # type: ignore[misc]
    (tmp_path / "tokens.octets").write_bytes(b"OCTS" + np.arange(10, dtype="<u8").tobytes())
    config = SourceConfig(path=str(tmp_path), eod_id=3)
    source = open_source(config, read_index(config, FetchConfig()), FetchConfig())
    assert source.eod_id == 3
    rows = np.empty((1, 10), source.dtype)
    source.read_rows(np.array([0]), rows)
    assert rows[0].tolist() == list(range(10))
