"""Compares tokenizers on the documents that they are meant for."""
