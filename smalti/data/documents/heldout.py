"""Assigns documents to the training or the held-out split, by their group only."""

from smalti.base.rng import derive_key

HELDOUT = "heldout"
TRAIN = "train"
SPLITS = (TRAIN, HELDOUT)


def split_of(group: str, *, seed: int, heldout_frac: float) -> str:
    """Return ``heldout`` with probability ``heldout_frac``: the same for all documents of a group, on every machine.

    A larger fraction only adds held-out groups.
    """
    # An exact comparison: a 63-bit integer with the fraction scaled by 2**63.
    return HELDOUT if derive_key(seed, "heldout", group) < int(heldout_frac * 2.0**63) else TRAIN
