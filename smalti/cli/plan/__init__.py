"""`smalti plan`."""
