"""The generation engine: sequences, scheduler, key/value cache, model runner, and the engine that steps them."""
