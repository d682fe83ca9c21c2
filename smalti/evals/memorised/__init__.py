"""How often a model repeats its training text token for token."""
