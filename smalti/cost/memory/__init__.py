"""The bytes on one rank while training, moment by moment."""
