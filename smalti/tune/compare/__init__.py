"""Compares what a model answers when it is prompted, with retrieved examples, and tuned in several ways."""
