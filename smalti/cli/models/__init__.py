"""``smalti models``."""
