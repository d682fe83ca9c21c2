"""Tokenizers: trains a byte-level BPE, loads a tokenizer.json or tiktoken ranks, encodes in batches, formats chats."""
