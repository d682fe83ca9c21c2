"""Measurements: live bytes, collectives, and the matmul rate of a device."""
