"""From files of chats, instructions or preferences to tokenized examples.

The same files, config and tokenizer give the same examples in the same order. Every row is checked. Examples are
yielded batch by batch and not kept; ``dedup`` keeps a digest of each (100 bytes).
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from smalti.base.errors import DataError, UserError
from smalti.base.progress import Progress, no_progress
from smalti.config.examples import ExamplesConfig
from smalti.data.documents.heldout import split_of
from smalti.data.examples import Example
from smalti.tune.chats.chat_tokenizer import ChatTokenizer, Request, Tokens, in_loss
from smalti.tune.chats.files import at_row, read_chats
from smalti.tune.chats.formats import Chat
from smalti.tune.chats.report import ExamplesReport, SplitCounts

_BATCH_EXAMPLES = 256


@dataclass(frozen=True)
class _Draft:
    """An example that is not tokenized yet."""

    id: str
    where: str
    chat: Chat
    in_loss: tuple[list[int], ...]
    """Of each conversation, the numbers of the messages in the loss."""

    def requests(self) -> list[Request]:
        """Return a request for each conversation."""
        return [
            Request(messages, numbers, self.chat.tools)
            for messages, numbers in zip(self.chat.conversations, self.in_loss, strict=True)
        ]

    def turns(self) -> list[int]:
        """Return where the conversations may begin: messages of the user, up to the last one that has an answer."""
        prompt_ends = [numbers[0] for numbers in self.in_loss] if len(self.in_loss) > 1 else [self.in_loss[0][-1]]
        messages = self.chat.conversations[0]
        return [number for number in range(min(prompt_ends)) if messages[number]["role"] == "user"]

    def without_turns_before(self, begin: int) -> "_Draft":
        """Leave out the messages before ``begin``, except system messages at the start."""
        messages = self.chat.conversations[0]
        head = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        conversations = tuple([*messages[:head], *messages[begin:]] for messages in self.chat.conversations)
        numbers = tuple([n - begin + head for n in numbers if n >= begin] for numbers in self.in_loss)
        return replace(self, chat=replace(self.chat, conversations=conversations), in_loss=numbers)


def examples_of(
    config: ExamplesConfig,
    folder: str | Path,
    report: ExamplesReport,
    *,
    max_tokens: int | None = None,
    progress: Progress = no_progress,
) -> Iterator[tuple[str, Example]]:
    """Yield ("train" or "heldout", example) for the rows of the files, and count them in ``report``.

    Args:
        folder: The model or tokenizer folder.
        max_tokens: The longest example, unless the config has its own ``max_tokens``; absent: no limit.

    Raises:
        DataError: a row is wrong (unless ``unreadable`` is "drop"), or no training example is left.
        UserError: there is no such template.
    """
    limit_tokens = config.max_tokens or max_tokens
    builder = _Builder(config, folder, report, limit_tokens)
    drafts = _drafts(config, report)
    seen: set[bytes] = set()
    while batch := list(islice(drafts, _BATCH_EXAMPLES)):
        for draft, example in builder.examples(batch):
            if config.dedup:
                digest = _digest(example)
                if digest in seen:
                    report.duplicates.add(draft.where)
                    continue
                seen.add(digest)
            split = split_of(draft.chat.group, seed=config.seed, heldout_frac=config.heldout_frac)
            report.splits.setdefault(split, SplitCounts()).add(example)
            yield split, example
        progress("tokenizing examples", report.rows, report.rows, "row")
    if not report.rows:
        raise DataError(f"{', '.join(config.files)} holds no rows", allowed="one row or more")
    if "train" not in report.splits:
        raise DataError(
            f"no training example is left of the {report.rows:,} rows of {', '.join(config.files)}"
            + "".join(f"; {name}: {count}" for name, count in report.rows_of_table()),
            allowed="one example or more",
            hint="check the files, and the options that drop rows: tune.examples.too_long, heldout_frac, decontaminate",
        )


def _drafts(config: ExamplesConfig, report: ExamplesReport) -> Iterator[_Draft]:
    dirty: set[int] = set()
    if config.decontaminate:
        from smalti.tune.chats.contaminated import contaminated_rows  # its engine takes a second to import

        dirty = contaminated_rows(config)
    near: set[int] = set()
    if config.dedup == "near":
        from smalti.tune.chats.near import near_duplicates  # as above

        near = near_duplicates(config)
    for number, row in enumerate(read_chats(config)):
        report.rows += 1
        if row.chat is None:
            report.unreadable.add(f"{row.where}: {row.problem}")
        elif number in dirty:
            report.contaminated.add(row.where)
        elif number in near:
            report.near_duplicates.add(row.where)
        else:
            report.template = report.template if row.chat.is_text else config.template
            try:
                yield from _drafts_of(config, row.id, row.where, row.chat)
            except DataError as error:
                _bad_row(row.where, error, config, report)


def _bad_row(where: str, error: UserError, config: ExamplesConfig, report: ExamplesReport) -> None:
    if config.unreadable == "stop":
        raise at_row(where, error) from error
    report.unreadable.add(f"{where}: {error.message}")


def _drafts_of(config: ExamplesConfig, name: str, where: str, chat: Chat) -> list[_Draft]:
    if chat.is_text:
        return [_Draft(name, where, chat, ([0],))]
    numbers = [
        in_loss(messages, roles=config.roles, turns=config.turns, first=chat.first) for messages in chat.conversations
    ]
    if not all(numbers):
        raise DataError("no message is in the loss", allowed=f"a message of {', '.join(config.roles)}")
    if config.turns != "each":
        return [_Draft(name, where, chat, tuple(numbers))]
    if len(numbers) > 1:
        if any(len(of_answer) > 1 for of_answer in numbers):
            raise DataError("an answer has several messages", allowed="turns=all, or one message in each")
        return [_Draft(name, where, chat, tuple(numbers))]
    return [
        _Draft(
            name if len(numbers[0]) == 1 else f"{name}#{number}",
            where,
            replace(chat, conversations=(chat.conversations[0][: number + 1],)),
            ([number],),
        )
        for number in numbers[0]
    ]


class _Builder:
    """Tokenizes drafts, shortens those that are too long, and counts those that cannot be used."""

    def __init__(
        self, config: ExamplesConfig, folder: str | Path, report: ExamplesReport, limit_tokens: int | None
    ) -> None:
        self._config = config
        self._folder = folder
        self._report = report
        self._limit_tokens = limit_tokens
        self._tokenizers: dict[str, ChatTokenizer] = {}

    def examples(self, drafts: Sequence[_Draft]) -> Iterator[tuple[_Draft, Example]]:
        """Yield the examples of the drafts, in order."""
        results = self._tokenize(drafts)
        for draft, tokens in zip(drafts, results, strict=True):
            if isinstance(tokens, UserError):
                _bad_row(draft.where, tokens, self._config, self._report)
                continue
            fitting = self._fitted(draft, tokens)
            if fitting is None:
                self._report.too_long.add(draft.where)
            else:
                yield draft, _example(draft, fitting)

    def _tokenize(self, drafts: Sequence[_Draft]) -> list[list[Tokens] | UserError]:
        results: list[list[Tokens] | UserError] = []
        by_template: dict[str, list[Request]] = {}
        for draft in drafts:
            by_template.setdefault(self._template(draft), []).extend(draft.requests())
        tokens = {name: iter(self._tokenizer(name).tokenize(requests)) for name, requests in by_template.items()}
        for draft in drafts:
            of_draft = list(islice(tokens[self._template(draft)], len(draft.in_loss)))
            error = next((result for result in of_draft if isinstance(result, UserError)), None)
            results.append(error or [result for result in of_draft if isinstance(result, Tokens)])
        return results

    def _template(self, draft: _Draft) -> str:
        return "none" if draft.chat.is_text else self._config.template

    def _tokenizer(self, template: str) -> ChatTokenizer:
        if template not in self._tokenizers:
            self._tokenizers[template] = ChatTokenizer(self._folder, template)
        return self._tokenizers[template]

    def _fitted(self, draft: _Draft, tokens: list[Tokens]) -> list[Tokens] | None:
        """Return tokens that fit ``max_tokens``; None if the example is dropped."""
        if self._fits(tokens):
            return tokens
        if self._config.too_long == "stop":
            raise DataError(
                f"{draft.where}: the example has {_n_targets(tokens):,} tokens after the first",
                allowed=f"up to {self._limit_tokens:,}",
                hint="tune.examples.too_long=truncate or too_long=drop, or raise max_tokens",
            )
        if self._config.too_long == "drop":
            return None
        shorter = self._first_tokens(tokens[0]) if draft.chat.is_text else self._last_turns(draft)
        if shorter is not None:
            self._report.truncated.add(draft.where)
        return shorter

    def _fits(self, tokens: list[Tokens]) -> bool:
        return self._limit_tokens is None or _n_targets(tokens) <= self._limit_tokens

    def _first_tokens(self, tokens: Tokens) -> list[Tokens]:
        assert self._limit_tokens is not None
        ids, mask = (values[: self._limit_tokens + 1] for values in (tokens.ids, tokens.mask))
        text = self._tokenizer("none").tokenizer.decode(ids)
        return [Tokens(ids, mask, len(text.encode()))]

    def _last_turns(self, draft: _Draft) -> list[Tokens] | None:
        turns = draft.turns()[1:]
        fitting: dict[int, list[Tokens]] = {}

        def fits(begin: int) -> bool:
            (tokens,) = self._tokenize([draft.without_turns_before(begin)])
            if isinstance(tokens, UserError) or not self._fits(tokens):
                return False
            fitting[begin] = tokens
            return True

        place = bisect_left(turns, True, key=fits)
        return fitting[turns[place]] if place < len(turns) else None


def _n_targets(tokens: list[Tokens]) -> int:
    return sum(len(sequence.ids) - 1 for sequence in tokens)


def _example(draft: _Draft, tokens: list[Tokens]) -> Example:
    sequences = []
    for sequence in tokens:
        mask = array("B", sequence.mask)
        mask[0] = 0  # nothing predicts the first token
        sequences.append((array("i", sequence.ids), mask))
    return Example(tuple(sequences), draft.chat.values, draft.id, sum(sequence.n_loss_bytes for sequence in tokens))


def _digest(example: Example) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((sorted(example.values.items()), [len(ids) for ids, _ in example.sequences])).encode())
    for ids, mask in example.sequences:
        digest.update(array("i", ids).tobytes())
        digest.update(array("B", mask).tobytes())
    return digest.digest()
