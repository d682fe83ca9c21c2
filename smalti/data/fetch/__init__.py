"""Bytes of the files of one folder, wherever it lies: read by range, together, with retries, mirrors and a cache."""

from smalti.data.fetch.files import Files, Range, Share
from smalti.data.fetch.open import open_files

__all__ = ["Files", "Range", "Share", "open_files"]
