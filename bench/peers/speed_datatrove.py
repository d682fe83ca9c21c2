"""datatrove's filters and PII formatter as its own pipeline, on one core (run by bench/build_speed.py).

    speed_datatrove.py DOCUMENTS OUTPUT WORDS     prints JSON: processor seconds and the documents that are kept

From Parquet to Parquet, by its local executor with one task; one document goes through first, so that what is loaded at
the first use is not counted. ``WORDS``: ``english``, its own word and sentence splitter
(spaCy); or ``same``, the expressions of Smalti's rules in its place.
"""

import json
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter
from loguru import logger
from rules_datatrove import use_same_words


def cpu_s(documents: str, output: str) -> float:
    """Return the processor seconds of the pipeline."""
    steps = [
        ParquetReader(documents, read_metadata=False),
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(),
        FineWebQualityFilter(),
        PIIFormatter(),
        ParquetWriter(f"{output}/kept"),
    ]
    executor = LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{output}/logs")
    begin_s = time.process_time()
    executor.run()
    return time.process_time() - begin_s


def main() -> None:
    """Run the pipeline on one document, then on all."""
    documents, output, words = sys.argv[1:]
    logger.remove()
    if words == "same":
        use_same_words()
    warm = Path(output, "warm")
    warm.mkdir(parents=True)
    prose = " ".join(f"This is the sentence {chr(97 + n)} of a text that has words." for n in range(26))
    pq.write_table(pa.table({"id": ["0"], "text": [prose]}), warm / "one.parquet")
    cpu_s(str(warm), f"{output}/of-warm")
    result = {"cpu_s": cpu_s(documents, output)}
    kept = sum(pq.read_metadata(path).num_rows for path in Path(output, "kept").glob("*.parquet"))
    print(json.dumps(result | {"kept": kept}))


if __name__ == "__main__":
    main()
