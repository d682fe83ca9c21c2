"""`smalti runs`."""
