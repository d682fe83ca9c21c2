"""``Tokenizer``: text to ids and back, its digest, and its Hugging Face files.

Guarantees: ``encode`` reads ``<|endoftext|>`` inside a document as text, unless ``special`` is set; ``encode_batch``
gives the same ids as ``encode``; the digest covers all that decides ids and nothing else.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError, missing_extra
from smalti.config.curate import SplitPattern
from smalti.data.tokenizer.digest import digest_of
from smalti.data.tokenizer.extend import extend_bpe
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.tiktoken_encoding import is_byte_level, structure_of, tiktoken_of, token_bytes_of
from smalti.data.tokenizer.tiktoken_ranks import known_or_given, read_ranks, tokenizer_from_ranks

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIALS_FILE = "special_tokens_map.json"

_EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer:
    """A tokenizer. ``inner`` is a ``tokenizers.Tokenizer``, which is not changed."""

    def __init__(self, inner: Any, eod_token: str, config: dict[str, Any] | None = None) -> None:
        """``config`` is the content of its ``tokenizer_config.json``, which is saved again."""
        eod_id = inner.token_to_id(eod_token)
        if eod_id is None:
            raise UserError(
                f"the tokenizer has no token '{eod_token}'", hint="name the token that ends a document: eod_token=..."
            )
        self.eod_token = eod_token
        self.eod_id = int(eod_id)
        self._config = dict(config or {})
        self._parts = structure_of(inner)
        self._special = inner
        # Reads special tokens as plain text: documents may quote them.
        self._plain = type(inner).from_str(inner.to_str())
        self._plain.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one: the size of an embedding."""
        return 1 + int(max(self._special.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which decode to no text."""
        return frozenset(token["id"] for token in self._parts["added_tokens"] if token["special"])

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of all added tokens, special or not: each is one id wherever its text is."""
        return {token["content"]: int(token["id"]) for token in self._parts["added_tokens"]}

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids below ``vocab_size`` without a token: some vocabularies have holes."""
        if self._is_byte_level:
            return frozenset(range(self.vocab_size)) - self._token_bytes.keys()
        return frozenset(token for token in range(self.vocab_size) if self._special.id_to_token(token) is None)

    @cached_property
    def most_token_bytes(self) -> int:
        """Upper bound on the bytes of a token; a generous guess if tokens are not plain bytes."""
        return max(map(len, self._token_bytes.values())) if self._is_byte_level else 256

    @cached_property
    def template_ids(self) -> list[int]:
        """The ids that the tokenizer's own template puts before a text: a begin token, or none."""
        return list(self._special.encode("", add_special_tokens=True).ids)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides ids (vocabulary, merges, split, added tokens), and of ``eod_id``."""
        return digest_of(self._parts, self.eod_id)

    @cached_property
    def _bulk(self) -> tuple[Any, str]:
        return tiktoken_of(self._parts)

    @cached_property
    def _located(self) -> Any:
        # Post-processors move the offsets of tokens beyond the blanks that they begin with.
        parts = json.loads(self._special.to_str()) | {"post_processor": None}
        return type(self._special).from_str(json.dumps(parts))

    @property
    def slow_because(self) -> str:
        """Why ``encode_batch`` cannot use tiktoken; empty if it can."""
        return self._bulk[1]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of ``text`` and no others; with ``special``, special tokens in it are recognised.

        Raises UserError for half of a surrogate pair, which a chat template may write.
        """
        engine = self._special if special else self._plain
        try:
            return list(engine.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
            if half is None:
                raise
            raise UserError(f"the text holds {half!a}, half of a surrogate pair", allowed="Unicode text") from error

    def encode_located(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return for each text its ids, special tokens recognised, and the characters [begin, end) of each id."""
        encodings = self._located.encode_batch(list(texts), add_special_tokens=False)
        return [(list(encoding.ids), list(encoding.offsets)) for encoding in encodings]

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Return the ids of each text, with special tokens read as text; with tiktoken much faster than ``encode``."""
        encoding = self._bulk[0]
        if encoding is not None:
            try:
                return list(encoding.encode_ordinary_batch(list(texts), num_threads=threads))
            except BaseException as error:  # a million consecutive blanks overflow the stack of tiktoken's expressions
                if type(error).__name__ != "PanicException":
                    raise
        return [list(encoding.ids) for encoding in self._plain.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 (an incomplete character) become U+FFFD."""
        token_ids = [int(i) for i in ids]
        if not self._is_byte_level:
            return str(self._special.decode(token_ids, skip_special_tokens=skip_special))
        parts = (self.token_bytes(i) for i in token_ids if not (skip_special and i in self.special_ids))
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id. UserError for an id outside the vocabulary or without bytes."""
        token = self._token_bytes.get(token_id)
        if token is None:
            raise UserError(f"the id {token_id} is not in the vocabulary", allowed=f"0 to {self.vocab_size - 1}")
        return token

    def bytes_of_ids(self) -> list[bytes] | None:
        """Return the bytes of every id below ``vocab_size``, of which ``decode`` joins a text; none of a special one.

        None if a token's text depends on its neighbours.
        """
        if not self._is_byte_level:
            return None
        table = [b""] * self.vocab_size
        for token_id, data in self._token_bytes.items():
            table[token_id] = b"" if token_id in self.special_ids else data
        return table

    def extended(self, texts: Iterable[str], n_new: int) -> "Tokenizer":
        """Return a tokenizer with up to ``n_new`` more entries, trained on ``texts`` (``extend_bpe``)."""
        return Tokenizer(extend_bpe(self._special, texts, n_new), self.eod_token, self._config)

    def decode_stream(self) -> "StreamDecoder":
        """Return a decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    @cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._parts)

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = {token["id"]: token["content"].encode() for token in self._parts["added_tokens"]}
        # Other kinds may have their vocabulary as a list, and their tokens are not in GPT-2's printable form.
        return (token_bytes_of(self._parts) if self._is_byte_level else {}) | added

    def save(self, folder: str | Path) -> None:
        """Write the files that ``transformers.AutoTokenizer`` and ``load_tokenizer`` read."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        # A document begins after the token that ends the previous one, so the same token begins a text.
        specials = {"bos_token": self.eod_token, "eos_token": self.eod_token, "pad_token": self.eod_token}
        store.write_text(store.join(folder, TOKENIZER_FILE), self._special.to_str(pretty=False))
        store.write_json(store.join(folder, CONFIG_FILE), config | specials | self._config)
        store.write_json(store.join(folder, SPECIALS_FILE), specials)


class StreamDecoder:
    """Decodes ids one by one, by whole characters; the joined results are ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._decoded = ""

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty inside a character and for a special token."""
        if token_id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._by_difference(token_id)

    def finish(self) -> str:
        """Return the rest; an incomplete character becomes U+FFFD."""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._tokenizer.decode(self._ids)
        rest, self._decoded = text[len(self._decoded) :], text
        return rest

    def _by_difference(self, token_id: int) -> str:
        # Other decoders depend on neighbours (blanks before words), so all ids are decoded and the new part returned.
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""
        new, self._decoded = text[len(self._decoded) :], text
        return new


def load_tokenizer(path: str | Path, *, eod_token: str | None = None, pattern: SplitPattern | None = None) -> Tokenizer:
    """Load a ``tokenizer.json``, or the folder with one, or a tiktoken rank file.

    Args:
        eod_token: The token that ends a document; absent: the eos token of ``tokenizer_config.json``, or a known name.
        pattern: How text is split into words; for rank files only.

    Raises:
        DataError: there is no such file, or it is neither of the two.
        UserError: no token ends a document, or ``pattern`` has no effect.
    """
    path = str(path)
    if not store.exists(path):
        raise DataError(f"{path} does not exist", hint="give a tokenizer.json, its folder, or a tiktoken rank file")
    if store.exists(store.join(path, TOKENIZER_FILE)):
        path = store.join(path, TOKENIZER_FILE)
    elif store.is_local(path) and Path(path).is_dir():
        inside = Path(path) / "tokenizer"  # of a run, and of the output of smalti data tokenize
        raise DataError(
            f"the folder {path} has no {TOKENIZER_FILE}",
            hint=f"its folder {inside} has one"
            if (inside / TOKENIZER_FILE).is_file()
            else "copy it from the original model; for a tokenizer in another format "
            "AutoTokenizer.from_pretrained(OLD).save_pretrained(NEW) writes it",
        )
    data = store.read_bytes(path)
    if data.lstrip()[:1] != b"{":
        ranks = read_ranks(path)
        known = known_or_given(path, len(ranks), pattern)
        return Tokenizer(tokenizer_from_ranks(ranks, known), eod_token or known.eod_token)
    if pattern is not None:
        raise UserError(f"pattern={pattern} has no effect on {path}", hint="leave it out: the file has its own pattern")
    inner = _parse(data, path)
    config = _config_beside(path)
    return Tokenizer(inner, eod_token or _declared_eod(inner, config, path), config)


def _parse(data: bytes, path: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise missing_extra("tokenizers", "data", "reading a tokenizer.json", error) from error
    try:
        return tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises a plain Exception for a file that it cannot parse
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error


def _config_beside(path: str) -> dict[str, Any]:
    config_path = store.join(path.removesuffix(TOKENIZER_FILE) or ".", CONFIG_FILE)
    if not path.endswith(TOKENIZER_FILE) or not store.exists(config_path):
        return {}
    value = store.read_json(config_path)
    if not isinstance(value, dict):
        raise DataError(f"{config_path} is not a JSON object: {json.dumps(value)[:60]}")
    return value


def _declared_eod(inner: Any, config: dict[str, Any], path: str) -> str:
    declared = config.get("eos_token")
    if isinstance(declared, dict):
        declared = declared.get("content")
    for name in (declared, *_EOD_NAMES):
        if isinstance(name, str) and inner.token_to_id(name) is not None:
            return name
    raise UserError(
        f"{path} does not say which token ends a document",
        hint="name it: eod_token='...' (it must be in the vocabulary)",
    )
