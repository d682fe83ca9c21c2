"""The tokenizer that the rest of the house uses: text to ids and back, its digest, and its Hugging Face files.

Promises: ``encode`` takes text as text (``<|endoftext|>`` inside a document never becomes the special token unless it
is asked for); ``encode_batch`` gives the same ids as ``encode``; the digest names what decides ids and nothing else.
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
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.tiktoken_encoding import is_byte_level, structure_of, tiktoken_of, token_bytes_of
from smalti.data.tokenizer.tiktoken_ranks import known_or_given, read_ranks, tokenizer_from_ranks

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIALS_FILE = "special_tokens_map.json"

_EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer:
    """A loaded or freshly trained tokenizer. ``inner`` is a ``tokenizers.Tokenizer``, which is not changed."""

    def __init__(self, inner: Any, eod_token: str, config: dict[str, Any] | None = None) -> None:
        """``config`` is the content of a ``tokenizer_config.json`` that came with it and is saved again."""
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
        # The same vocabulary with special tokens read as plain text: documents may quote them.
        self._plain = type(inner).from_str(inner.to_str())
        self._plain.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one: what an embedding needs."""
        return 1 + int(max(self._special.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(token["id"] for token in self._parts["added_tokens"] if token["special"])

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids below ``vocab_size`` that stand for no token: the holes of a vocabulary that came from elsewhere."""
        if self._is_byte_level:
            return frozenset(range(self.vocab_size)) - self._token_bytes.keys()
        return frozenset(token for token in range(self.vocab_size) if self._special.id_to_token(token) is None)

    @cached_property
    def most_token_bytes(self) -> int:
        """A text of n tokens has at most n times as many bytes; a generous guess where tokens are not plain bytes."""
        return max(map(len, self._token_bytes.values())) if self._is_byte_level else 256

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over all that decides ids (vocabulary, merges, split, added tokens) and the end of a document."""
        return digest_of(self._parts, self.eod_id)

    @cached_property
    def _bulk(self) -> tuple[Any, str]:
        return tiktoken_of(self._parts)

    @property
    def slow_because(self) -> str:
        """Why ``encode_batch`` cannot use tiktoken; empty when it can."""
        return self._bulk[1]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``, nothing added before or after; ``special``: special tokens in the text count as such.

        UserError for half of a surrogate pair: a chat template may write one.
        """
        engine = self._special if special else self._plain
        try:
            return list(engine.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            half = next((one for one in text if "\ud800" <= one <= "\udfff"), None)
            if half is None:
                raise
            raise UserError(f"the text holds {half!a}, half of a surrogate pair", allowed="Unicode text") from error

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Ids of many texts, special tokens read as plain text; several times as fast as ``encode`` where possible."""
        encoding = self._bulk[0]
        if encoding is not None:
            try:
                return list(encoding.encode_ordinary_batch(list(texts), num_threads=threads))
            except BaseException as error:  # a million blanks in a row overflow the stack of tiktoken's expressions
                if type(error).__name__ != "PanicException":
                    raise
        return [list(one.ids) for one in self._plain.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 (a cut-off character) become U+FFFD."""
        wanted = [int(i) for i in ids]
        if not self._is_byte_level:
            return str(self._special.decode(wanted, skip_special_tokens=skip_special))
        kept = (self.token_bytes(i) for i in wanted if not (skip_special and i in self.special_ids))
        return b"".join(kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for. UserError for an id outside the vocabulary or without bytes of its own."""
        found = self._token_bytes.get(token_id)
        if found is None:
            raise UserError(f"the id {token_id} is not in the vocabulary", allowed=f"0 to {self.vocab_size - 1}")
        return found

    def decode_stream(self) -> "StreamDecoder":
        """A decoder for ids that come one by one."""
        return StreamDecoder(self)

    @cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._parts)

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = {token["id"]: token["content"].encode() for token in self._parts["added_tokens"]}
        # Other kinds may hold their vocabulary as a list, and their tokens are not in GPT-2's printable form.
        return (token_bytes_of(self._parts) if self._is_byte_level else {}) | added

    def save(self, folder: str | Path) -> None:
        """Write what ``transformers.AutoTokenizer`` and ``load_tokenizer`` read."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        # A document begins after the token that ended the one before, so the same token begins a text.
        specials = {"bos_token": self.eod_token, "eos_token": self.eod_token, "pad_token": self.eod_token}
        store.write_text(store.join(folder, TOKENIZER_FILE), self._special.to_str(pretty=False))
        store.write_json(store.join(folder, CONFIG_FILE), config | specials | self._config)
        store.write_json(store.join(folder, SPECIALS_FILE), specials)


class StreamDecoder:
    """Ids in, text out as soon as whole characters are there; what comes out joins to ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty inside a character and for a special token."""
        if token_id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._by_difference(token_id)

    def finish(self) -> str:
        """What is left: a character that was cut off becomes U+FFFD."""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._tokenizer.decode(self._ids)
        rest, self._shown = text[len(self._shown) :], text
        return rest

    def _by_difference(self, token_id: int) -> str:
        # Other decoders look at neighbours (blanks before words), so the whole is decoded and the new part shown.
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def load_tokenizer(path: str | Path, *, eod_token: str | None = None, pattern: SplitPattern | None = None) -> Tokenizer:
    """Load a ``tokenizer.json`` (or the folder that holds it) or a tiktoken rank file.

    ``eod_token``: the token that ends a document; absent: what ``tokenizer_config.json`` calls eos, else a known name.
    ``pattern`` is for rank files only. DataError when there is no such file or it is neither of the two.
    """
    path = str(path)
    if not store.exists(path):
        raise DataError(f"{path} does not exist", hint="give a tokenizer.json, its folder, or a tiktoken rank file")
    if store.exists(store.join(path, TOKENIZER_FILE)):
        path = store.join(path, TOKENIZER_FILE)
    elif store.is_local(path) and Path(path).is_dir():
        raise DataError(
            f"the folder {path} has no {TOKENIZER_FILE}",
            hint="bring it from where the folder is from; of a tokenizer in another form "
            "AutoTokenizer.from_pretrained(OLD).save_pretrained(NEW) writes it",
        )
    data = store.read_bytes(path)
    if data.lstrip()[:1] != b"{":
        ranks = read_ranks(path)
        known = known_or_given(path, len(ranks), pattern)
        return Tokenizer(tokenizer_from_ranks(ranks, known), eod_token or known.eod_token)
    if pattern is not None:
        raise UserError(
            f"pattern={pattern} has no effect on {path}", hint="leave it out: the file says how text is cut"
        )
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
    except Exception as error:  # the library raises plain Exception for a file that it cannot parse
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error


def _config_beside(path: str) -> dict[str, Any]:
    beside = store.join(path.removesuffix(TOKENIZER_FILE) or ".", CONFIG_FILE)
    if not path.endswith(TOKENIZER_FILE) or not store.exists(beside):
        return {}
    value = store.read_json(beside)
    if not isinstance(value, dict):
        raise DataError(f"{beside} does not hold an object: {json.dumps(value)[:60]}")
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
