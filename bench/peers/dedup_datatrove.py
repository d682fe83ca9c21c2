"""datatrove's MinHash deduplication, all four stages, through its public classes (run by bench/dedup.py).

Words and shingles are datatrove's own (spaCy's English word tokenizer, its normalisation), hashes its default
(xxhash, 64 bits). As many workers as cores; a task for each file, and one for each bucket in the second stage. Kept
documents are written as JSON lines without compression, which is its fastest writer. ``--words blanks`` puts a plain
split in the place of spaCy, which takes nine tenths of the time: faster than anything that datatrove offers itself.
"""

import argparse
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.typeshelper import Languages


class Blanks:
    """A replacement of datatrove's word tokenizer; its normalisation has already removed punctuation."""

    def word_tokenize(self, text: str) -> list[str]:
        """Split at blanks."""
        return text.split()


def main() -> None:
    """Read DOCUMENTS/*/train.parquet, write OUTPUT/kept/*.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents")
    parser.add_argument("output")
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--buckets", type=int, default=14)
    parser.add_argument("--hashes", type=int, default=8)
    parser.add_argument("--ngrams", type=int, default=5)
    parser.add_argument("--words", choices=["english", "blanks"], default="english")
    options = parser.parse_args()
    config = MinhashConfig(n_grams=options.ngrams, num_buckets=options.buckets, hashes_per_bucket=options.hashes)
    n_files = len(list(Path(options.documents).glob("*/train.parquet")))
    output = options.output

    def reader() -> ParquetReader:
        return ParquetReader(options.documents, glob_pattern="*/train.parquet", read_metadata=False)

    signature = MinhashDedupSignature(f"{output}/signatures", config, Languages.english)
    if options.words == "blanks":
        signature.word_tokenizer = Blanks()
    stages = [
        (n_files, [reader(), signature]),
        (options.buckets, [MinhashDedupBuckets(f"{output}/signatures", f"{output}/buckets", config=config)]),
        (1, [MinhashDedupCluster(f"{output}/buckets", f"{output}/removed", config)]),
        (
            n_files,
            [reader(), MinhashDedupFilter(f"{output}/removed"), JsonlWriter(f"{output}/kept", compression=None)],
        ),
    ]
    for number, (tasks, pipeline) in enumerate(stages, start=1):
        workers = min(options.cores, tasks)
        LocalPipelineExecutor(pipeline, tasks, workers, logging_dir=f"{output}/logs/{number}").run()


if __name__ == "__main__":
    main()
