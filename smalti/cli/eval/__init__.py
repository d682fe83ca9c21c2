"""`smalti eval`."""
