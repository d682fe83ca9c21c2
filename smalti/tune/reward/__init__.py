"""Reward models: a decoder with one score for a sequence instead of logits."""
