"""Turns raw documents into a deterministic stream of tokens; knows no model and no torch."""
