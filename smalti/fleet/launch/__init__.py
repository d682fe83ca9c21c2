"""Launchers: where ranks are started."""
