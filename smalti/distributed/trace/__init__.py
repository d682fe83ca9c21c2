"""Measured: live bytes, peak, traffic."""
