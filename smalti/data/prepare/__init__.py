"""Turns raw documents into clean, unique documents (curate, dedup) and those into token files (tokenize)."""
