"""Tokenized examples for tuning: sequences with a loss mask, stored in a folder that the stream reads as a source."""

from smalti.data.examples.example import Example

__all__ = ["Example"]
