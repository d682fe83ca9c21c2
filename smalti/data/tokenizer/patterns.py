"""How text is cut into words before bytes are merged, and the bytes' printable stand-ins in ``tokenizer.json``.

The expressions are those of the published tokenizers (tiktoken's ``gpt2``, ``cl100k_base``, ``o200k_base``), which our
own are trained with too: an expression that both engines know makes identical ids possible.
"""

from dataclasses import dataclass

from smalti.config.curate import SplitPattern

EOD = "<|endoftext|>"
"""Ends every document in our own tokenizers."""

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
"""Name -> regular expression; everything it does not match is a piece of its own too, so no byte is lost."""


@dataclass(frozen=True)
class KnownRanks:
    """A published rank file: its expression and its special tokens, which the file itself does not hold."""

    pattern: SplitPattern
    eod_token: str
    special_tokens: dict[str, int]


KNOWN_RANKS: dict[int, KnownRanks] = {
    50_256: KnownRanks("gpt2", EOD, {EOD: 50_256}),
    100_256: KnownRanks("cl100k", EOD, {EOD: 100_257}),
    128_000: KnownRanks("cl100k", "<|end_of_text|>", {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}),
    199_998: KnownRanks("o200k", EOD, {EOD: 199_999}),
}
"""Number of ranks -> what it is: gpt2 (r50k_base), cl100k_base (DBRX too), Llama 3, o200k_base."""


def byte_symbols() -> list[str]:
    """For each byte the character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    shown = set(printable)
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]
