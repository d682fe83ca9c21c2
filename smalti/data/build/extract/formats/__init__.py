"""Formats that only ``smalti data build`` reads, one module each."""
