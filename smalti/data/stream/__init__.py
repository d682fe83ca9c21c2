"""The stream: batches by step, their state, forks and take-downs."""
