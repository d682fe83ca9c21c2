"""Keys of random draws. A key depends on what is drawn (seed, step, name ...), never on rank or history."""

import hashlib
import operator

_MASK_63 = (1 << 63) - 1


def derive_key(*parts: int | str) -> int:
    """Return a 63-bit key of a list of integers and strings; equal parts give equal keys on every machine.

    The parts are hashed with their type and length, so ("ab", "c") and ("a", "bc") differ, as do 1 and "1".
    Raises TypeError for a float, whose text is not the same everywhere.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else str(operator.index(part)).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") & _MASK_63
