"""What a model is asked: held-out text, and tasks generated from a seed."""
