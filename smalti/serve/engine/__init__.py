"""The generation engine: requests, scheduler, key/value cache, model runner, and the engine that steps them."""
