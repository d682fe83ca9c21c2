"""Token files: the one on-disk form of tokens, written once and read by range with every block checked."""

from smalti.data.tokens.manifest import Manifest
from smalti.data.tokens.reader import TokenSource
from smalti.data.tokens.writer import TokenWriter

__all__ = ["Manifest", "TokenSource", "TokenWriter"]
