"""The process group of an attempt: joining, the handshake, and lost ranks."""
