"""Copies of checkpoints in small parts, for tests."""

from smalti.base.objects import Requests
from smalti.track.checkpoints.copies import Copies

PART = 16_384
OBJECTS = 2 * 7 + 2 + 2
"""Of a copy: the parts of two shards, two small files, the index and COMPLETE."""


def opened(url: str, *, give_up_s: float = 20.0, rate: float = 5000.0) -> Copies:
    return Copies(url, Requests(rate, give_up_s=give_up_s), part_bytes=PART)
