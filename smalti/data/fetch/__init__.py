"""Reads byte ranges of the files of a folder, local or in a store: concurrently, with retries, mirrors and a cache."""

from smalti.data.fetch.files import Files, Range, Share
from smalti.data.fetch.open import open_files

__all__ = ["Files", "Range", "Share", "open_files"]
