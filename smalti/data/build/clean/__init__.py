"""Cleaning: language, markup and boilerplate, personal data."""
