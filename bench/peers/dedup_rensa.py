"""Deduplication with rensa as its README shows it: sketches, an index, estimated similarity (run by bench/dedup.py).

rensa makes sketches and finds candidates; reading, cutting into word shingles and writing are done here, the first two
in as many processes as cores. Estimates are not verified on the texts.
"""

import argparse
import multiprocessing
import re
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from rensa import RMinHash, RMinHashLSH

WORD = re.compile(r"\w+")
PERMUTATIONS = 128


def sketches(path: Path, ngrams: int) -> list[RMinHash]:
    """Return a sketch for each document of a file."""
    made: list[RMinHash] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=512, columns=["text"]):
            sets = [shingles(text, ngrams) for text in batch.column("text").to_pylist()]
            made += RMinHash.from_token_sets(sets, num_perm=PERMUTATIONS, seed=42)
    return made


def shingles(text: str, ngrams: int) -> list[str]:
    """Return the word shingles of a text, in lower case and without punctuation."""
    words = WORD.findall(text.lower())
    shifted = [words[i:] for i in range(ngrams)]
    return list(map(" ".join, zip(*shifted, strict=False)))


def removed(signatures: list[RMinHash], bands: int, threshold: float) -> set[int]:
    """Find duplicates as the README does, but insert and query in one call each."""
    index = RMinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, num_bands=bands)
    index.insert_many(signatures)
    gone: set[int] = set()
    for number, candidates in enumerate(index.query_all(signatures)):
        if number in gone:
            continue
        for candidate in candidates:
            alike = candidate != number and candidate not in gone
            if alike and signatures[number].jaccard(signatures[candidate]) >= threshold:
                gone.add(max(number, candidate))
    return gone


def main() -> None:
    """Read DOCUMENTS/*/train.parquet, write OUTPUT/kept/*.parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--bands", type=int, default=16)
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--ngrams", type=int, default=5)
    options = parser.parse_args()
    paths = sorted(options.documents.glob("*/train.parquet"))
    with multiprocessing.Pool(options.cores) as pool:
        parts = pool.map(partial(sketches, ngrams=options.ngrams), paths, chunksize=1)
    gone = removed([sketch for part in parts for sketch in part], options.bands, options.threshold)
    (options.output / "kept").mkdir(parents=True)
    first = 0
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        table = pq.read_table(path)
        rows = [row for row in range(len(part)) if first + row not in gone]
        pq.write_table(table.take(rows), options.output / "kept" / f"{number}.parquet", compression="zstd")
        first += len(part)


if __name__ == "__main__":
    main()
