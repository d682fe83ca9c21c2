"""The time of one step on one rank, part by part."""
