"""Output heads for ``Decoder.forward``: what a loss needs of the vocabulary, with one tile of logits at a time."""
