"""The expressions that split text into words before bytes are merged, and GPT-2's printable form of bytes.

The expressions are those of the published tokenizers (tiktoken's ``gpt2``, ``cl100k_base``, ``o200k_base``). Trained
tokenizers use them too, so that both engines give the same ids.
"""

from dataclasses import dataclass

from smalti.config.curate import SplitPattern

EOD = "<|endoftext|>"
"""Ends every document in tokenizers that are trained here."""

_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS: dict[SplitPattern, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": _O200K,
}
"""Name -> regular expression; text that it does not match is a word too, so no byte is lost."""


@dataclass(frozen=True)
class KnownRanks:
    """A published rank file: its expression and its special tokens, which are not in the file."""

    pattern: SplitPattern
    eod_token: str
    special_tokens: dict[str, int]


KNOWN_RANKS: dict[int, KnownRanks] = {
    50_256: KnownRanks("gpt2", EOD, {EOD: 50_256}),
    100_256: KnownRanks("cl100k", EOD, {EOD: 100_257}),
    128_000: KnownRanks("cl100k", "<|end_of_text|>", {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}),
    199_998: KnownRanks("o200k", EOD, {EOD: 199_999}),
}
"""Number of ranks -> tokenizer: gpt2 (r50k_base), cl100k_base (DBRX too), Llama 3, o200k_base."""


def byte_symbols() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
