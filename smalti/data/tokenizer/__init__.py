"""Text to ids and back: train a byte-level BPE, load any tokenizer.json or tiktoken ranks, encode in bulk."""
