"""Runs that fail: how often, what it costs, how often to save; in closed form and played through."""
