"""Trains a byte-level BPE tokenizer, whose ids decode to every byte of a text."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from smalti.base.errors import DataError, UserError, missing_extra
from smalti.config.curate import SplitPattern
from smalti.data.tokenizer.patterns import EOD, PATTERNS

_BYTES = 256


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (EOD,),
    *,
    pattern: SplitPattern = "cl100k",
) -> Any:
    """Train on ``texts``; returns a ``tokenizers.Tokenizer`` of at most ``vocab_size`` entries, special tokens last.

    Of a run of more than 1,000 letters and digits, blanks, or symbols the first 1,000 are used. A small corpus can run
    out of pairs to merge; the vocabulary is then smaller. Equal texts in equal order give an equal tokenizer.

    Raises:
        UserError: ``vocab_size`` is too small for the 256 bytes and the special tokens.
        DataError: there is no text.
    """
    if vocab_size < _BYTES + len(special_tokens):
        raise UserError(
            f"vocab_size is {vocab_size}",
            allowed=f"at least {_BYTES + len(special_tokens)} (all bytes, special tokens)",
        )
    try:
        from tokenizers import AddedToken, trainers
        from tokenizers.pre_tokenizers import ByteLevel
    except ImportError as error:
        raise missing_extra("tokenizers", "data", "training a tokenizer", error) from error
    counted = _Counted(texts)
    tokenizer = empty_bpe(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(counted, trainer)
    if not counted.n_characters:
        raise DataError("there is no text to train a tokenizer on", hint="check the documents folder")
    # Added after training, so that the ids of merges count from 0, as in a rank file.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def empty_bpe(pattern: SplitPattern, model: Any = None) -> Any:
    """Return a byte-level ``tokenizers.Tokenizer`` of ``model`` (None: an empty BPE) that splits by ``pattern``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE() if model is None else model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_LONG_RUN = re.compile(r"(\w{1000})\w+|(\s{1000})\s+|([^\w\s]{1000})[^\w\s]+")
"""More than 1,000 consecutive letters and digits, blanks, or symbols: not a word, and the trainer takes 20 GB and hours
for one of 200 MB."""


class _Counted:
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.n_characters = 0

    def __iter__(self) -> Any:
        for text in self._texts:
            self.n_characters += len(text)
            yield _LONG_RUN.sub(lambda match: match[match.lastindex or 0], text)
