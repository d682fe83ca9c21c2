"""`smalti data`."""
