"""`smalti train`."""
