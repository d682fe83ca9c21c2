"""Tunes a base model: losses of preferences, rewards and distillation, over the one training step."""
