"""Which documents are set aside. Decided by the group alone, before anything is learned or dropped."""

from smalti.base.rng import derive_key

HELDOUT = "heldout"
TRAIN = "train"
SPLITS = (TRAIN, HELDOUT)


def split_of(group: str, *, seed: int, heldout_frac: float) -> str:
    """``heldout`` with probability ``heldout_frac``, the same for every document of a group and for every machine.

    A larger fraction only adds groups: what was held out stays held out.
    """
    # Both sides are exact: a 63-bit integer against the fraction scaled by 2**63.
    return HELDOUT if derive_key(seed, "heldout", group) < int(heldout_frac * 2.0**63) else TRAIN
