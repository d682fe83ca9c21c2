"""``smalti tune``: from a base model to an assistant."""
