"""Extraction: files of many formats -> records of text, each problem with its reason."""
