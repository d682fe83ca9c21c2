"""Tunes a base model: tuning data, losses of preferences, rewards and distillation, over the one training step."""
