"""The step of a build that cuts out passages, paragraphs or lines which came earlier in the set."""
