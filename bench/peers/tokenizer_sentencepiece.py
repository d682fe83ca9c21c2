"""Trains or encodes with sentencepiece and prints the seconds that it took as JSON (run by bench/tokenizer.py).

BPE with byte fallback and without normalisation, so that the text comes back as it was; its way of cutting words and
so its vocabulary are its own, so ids cannot be compared with those of the others.
"""

import argparse
import json
import time
from pathlib import Path

import sentencepiece


def main() -> None:
    """``train``: TEXTS -> MODEL; ``encode``: both are read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["train", "encode"])
    parser.add_argument("texts", type=Path, help="a JSON list of texts")
    parser.add_argument("model", type=Path)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--vocab-size", type=int)
    options = parser.parse_args()
    texts = json.loads(options.texts.read_text())
    if options.work == "encode":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(options.model))
        begin = time.perf_counter()
        ids = processor.encode(texts, num_threads=options.cores)
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": sum(map(len, ids))}))
        return
    lines = [line for text in texts for line in text.splitlines()]
    begin = time.perf_counter()
    with options.model.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=options.vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            num_threads=options.cores,
            minloglevel=2,
        )
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
