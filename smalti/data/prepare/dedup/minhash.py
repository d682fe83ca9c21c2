"""MinHash: the signature of a text, its bands, and the number of distinct shingles that it estimates.

Two signatures agree in a value with a probability equal to the Jaccard similarity of the shingles (Broder, "On the
resemblance and containment of documents", 1997). Documents that agree in all rows of a band share a bucket and are
compared: at similarity s with probability 1 - (1 - s^rows)^bands.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.config.dedup import DedupConfig


def signature_of(words: Any, config: DedupConfig, functions: Any) -> Any:
    """Return the Daft expression of the signature, bands * rows values, of the column ``words``; ``functions`` are
    Daft's."""
    return functions.minhash(
        words,
        num_hashes=config.bands * config.rows,
        ngram_size=config.shingle_words,
        seed=1 + config.seed % (1 << 31),
        hash_function="xxhash3_64",
    )


def band_name(band: int) -> str:
    """Name of the column of a band."""
    return f"band_{band:03d}"


def hashes_of_bands(signatures: Any, n_bands: int, n_rows: int) -> list[npt.NDArray[np.uint64]]:
    """Hash each band of signatures [texts, n_bands * n_rows]; returns the order in large buckets, then the hashes."""
    values = signatures.astype(np.uint64)
    with np.errstate(over="ignore"):
        # These two values decide the neighbours in a large bucket.
        columns = [(values[:, 0] << np.uint64(31)) ^ values[:, -1]]
        for band in range(n_bands):
            mixed = np.full(len(values), band + 1, np.uint64)
            for row in range(n_rows):
                mixed = (mixed ^ values[:, band * n_rows + row]) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
            columns.append(mixed)
    return columns


def estimate_distinct(signatures: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Estimate the number of distinct shingles of each text from its signature [texts, values] of 32-bit values.

    The standard error is 8.5 % for 140 values.
    """
    # The minimum of n uniform numbers has the mean 1 / (n + 1).
    mean_frac = (signatures + 0.5).mean(axis=1) / 2**32
    return np.asarray(1 / np.maximum(mean_frac, 2.0**-40) - 1)
