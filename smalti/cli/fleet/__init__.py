"""``smalti fleet``."""
