"""Finds the text of each message in a rendered conversation, by rendering prefixes of it.

An answer begins where the prompt for it ends, and ends with the template's end of turn. Both are compared with the
text of the whole conversation: a template that writes a turn otherwise once others follow is refused.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smalti.base.errors import DataError
from smalti.data.tokenizer.chat import BREAK

_PROBES = ("Probe 1", "Probe 2", "Probe 3")
_SHOWN = 40


class Span(NamedTuple):
    """Characters [begin, end) of a text."""

    begin: int
    end: int


@dataclass(frozen=True)
class EndOfTurn:
    """What a template writes at the end of an answer."""

    text: str
    """One control token, or several one after the other."""
    before_next: str = ""
    """Where the token is at the beginning of the next message: the token, with the blanks before it."""


class ControlTokens:
    """Finds texts that are single tokens wherever they are."""

    def __init__(self, tokens: Collection[str]) -> None:
        # Some vocabularies have runs of blanks as added tokens.
        names = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        token = f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})"
        self._run = re.compile(f"{token}+")
        self._start = re.compile(rf"\s*{token}")
        self._last = re.compile(rf"{token}\s*\Z")

    def first(self, text: str) -> str:
        """Return the first one in ``text``, with those that follow at once; empty if there is none."""
        match = self._run.search(text)
        return match[0] if match else ""

    def at_start(self, text: str) -> str:
        """Return the one that ``text`` begins with, with the blanks before it; empty if there is none."""
        match = self._start.match(text)
        return match[0] if match else ""

    def end(self, text: str) -> int | None:
        """Return where the last one ends, if only blanks follow."""
        match = self._last.search(text)
        return len(match[0].rstrip()) + match.start() if match else None

    def only(self, text: str) -> bool:
        """Return whether ``text`` holds nothing but such tokens and blanks."""
        return not text.strip() or not self._run.sub("", text).strip()


PROBE_MESSAGES = [
    {"role": "user", "content": _PROBES[0]},
    {"role": "assistant", "content": _PROBES[1]},
    {"role": "user", "content": _PROBES[2]},
]
PROBE_PREFIXES = ((3, False), (2, False), (1, True), (1, False))


def end_of_turn(texts: Sequence[str], controls: ControlTokens) -> EndOfTurn:
    """Return the end of turn of a template, by its texts of ``PROBE_PREFIXES``.

    Raises DataError if it does not write answers, or writes them without an end that a model can learn.
    """
    following, answered, prompt, asked = texts
    begin = answered.find(_PROBES[1])
    if begin < 0:
        raise DataError(
            "the chat template does not write the answers of the assistant", hint="use tune.examples.template=chatml"
        )
    before = answered[len(prompt) : begin]
    if prompt == asked and before.strip():
        raise DataError(
            f"the chat template has no generation prompt, but writes {_shown(before)} before an answer",
            allowed="a template that ends with it where add_generation_prompt is set",
            hint="add to its end: {% if add_generation_prompt %}...{% endif %}, or use tune.examples.template=chatml",
        )
    tails = [text[text.find(_PROBES[1]) + len(_PROBES[1]) :] for text in (answered, following)]
    # The end of the last answer may have more, such as an eos token.
    text = controls.first(tails[0][: _n_equal(*tails)]) or controls.first(tails[0])
    if text:
        return EndOfTurn(text)
    before_next = controls.at_start(tails[1][len(tails[0]) :]) if tails[1].startswith(tails[0]) else ""
    if not before_next:
        raise DataError(
            "the chat template writes no token at the end of an answer, so a model would not learn to stop",
            allowed="a template with an end token after each answer, or one at the beginning of the next message",
            hint="write {{ eos_token }} after the answer in the template, or use tune.examples.template=chatml",
        )
    return EndOfTurn(before_next.strip(), before_next)


def check_continues(prompt: str, answered: str) -> None:
    """Raise DataError unless the text with an answer begins with the prompt for it."""
    if not answered.startswith(prompt):
        same = _n_equal(prompt, answered)
        raise DataError(
            f"the chat template ends the prompt for an answer with {_shown(prompt[same:])}, and writes "
            f"{_shown(answered[same:])} there once the answer is known",
            allowed="answers that continue their prompt: a model is trained on what it will be asked to continue",
            hint="change the template, or use tune.examples.template=chatml",
        )


class Renderings:
    """The texts of prefixes of one conversation."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        in_loss: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """``in_loss``: numbers of the messages to find."""
        self.in_loss = in_loss
        self._messages = messages
        self._tools = tools or ()
        self._answers = {number for number in in_loss if messages[number]["role"] == "assistant"}
        n = len(messages)
        wanted = [(n, False)]
        for number in in_loss:
            wanted += [(number, number in self._answers), (number + 1, False)]
        # Without messages only the prompt for an answer can be rendered.
        self.prefixes = [prefix for prefix in dict.fromkeys(wanted) if prefix != (0, False)]

    def spans(self, texts: Sequence[str], end: EndOfTurn, controls: ControlTokens) -> tuple[str, list[Span]]:
        """Return the text of the conversation, and where in it the messages in the loss are, with their ends of turn.

        Raises DataError if the template writes one of them otherwise in the conversation.
        """
        text_of = {(0, False): ""} | dict(zip(self.prefixes, texts, strict=True))
        whole = texts[0]
        spans = []
        for number in self.in_loss:
            prompt, answered = text_of[number, number in self._answers], text_of[number + 1, False]
            if number in self._answers:
                check_continues(prompt, answered)
            stop = self._end(whole, prompt, answered, end, controls)
            if stop is None and number in self._answers:
                raise DataError(
                    f"the chat template writes no token at the end of message {number + 1}: "
                    f"{_shown(answered[-_SHOWN:])}"
                )
            stop = len(answered) if stop is None else stop
            if not (whole if stop <= len(whole) else whole + end.before_next).startswith(answered[:stop]):
                same = _n_equal(answered[:stop], whole)
                raise DataError(
                    f"the chat template writes {_shown(answered[same:stop])} in message {number + 1}, and "
                    f"{_shown(whole[same:])} there once other messages follow",
                    allowed="templates that leave earlier turns as they were, or only the last turn in the loss",
                    hint="tune.examples.turns=each makes an example of each turn; turns=last trains on the last one",
                )
            _check_names(self._messages[number].get("tool_calls", ()), answered[len(prompt) : stop], "tool calls")
            spans.append(Span(len(prompt), stop))
        _check_names(self._tools, whole, "tools")
        longest = max((span.end for span in spans), default=0)
        return (whole if longest <= len(whole) else whole + end.before_next), spans

    def _end(self, whole: str, prompt: str, answered: str, end: EndOfTurn, controls: ControlTokens) -> int | None:
        if end.before_next:
            if answered == whole:
                return len(whole) + len(end.before_next)
            if not whole.startswith(answered):
                return len(answered)
            following = controls.at_start(whole[len(answered) :])
            return len(answered) + len(following) if following else None
        place, begin = len(answered), len(prompt)
        while (earlier := answered.rfind(end.text, begin, place)) >= 0:
            # After the last answer some templates write the same token again.
            if not controls.only(answered[earlier + len(end.text) : place]):
                break
            place = earlier
        if place < len(answered):
            return place + len(end.text)
        stop = controls.end(answered[len(prompt) :])
        return None if stop is None else len(prompt) + stop


def _check_names(functions: Sequence[Mapping[str, Any]], text: str, what: str) -> None:
    """Raise DataError unless ``text`` has the names of all functions: some templates leave out what they lack."""
    for function in functions:
        name = str(function.get("function", function).get("name", ""))
        if name.replace(BREAK, "") not in text.replace(BREAK, ""):
            raise DataError(
                f"the chat template does not write {what}: '{name}' is not in its text",
                allowed="a template that does, or conversations without",
            )


def _n_equal(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shown(text: str) -> str:
    return repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
