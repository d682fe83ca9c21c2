"""Sources of a mixture: token files of Smalti and of other systems, opened by one interface."""
