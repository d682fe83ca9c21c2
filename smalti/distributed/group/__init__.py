"""The ranks of an attempt: process group, handshake, device mesh, and lost ranks."""
