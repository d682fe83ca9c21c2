"""Code that belongs to no area: errors, storage, environment, logging, randomness, units, hashing, clock, charts."""
