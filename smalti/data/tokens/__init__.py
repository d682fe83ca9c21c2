"""Token files: the on-disk format of tokens, written once and read by range, with a check of every block."""

from smalti.data.tokens.manifest import Manifest
from smalti.data.tokens.reader import TokenSource
from smalti.data.tokens.writer import TokenWriter

__all__ = ["Manifest", "TokenSource", "TokenWriter"]
