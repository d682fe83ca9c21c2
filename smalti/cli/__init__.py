"""The verbs: parse, load the config, call one function, map errors to exit codes."""
