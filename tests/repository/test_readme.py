"""Every ``smalti ...`` line of the README, the docs and the help pages is one that the command takes; keys and metrics
that the pages name exist."""

import re
import shlex
from pathlib import Path

import pytest
import reference

from smalti.cli.main import VERBS
from smalti.config.run import RunConfig
from smalti.track.names import TABLE, metric

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
KEYS = {*reference.keys(RunConfig), "model.preset"}


def shown() -> list[str]:
    """Command lines in fenced blocks of the documentation, and the examples of all help pages."""
    found = []
    for page in PAGES:
        for text in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            block = re.sub(r"\\\n\s*", "", text)  # a command over several lines
            found += re.findall(r"^(?:\$ )?(?:\.venv/bin/)?(smalti [a-z].*)$", block, re.MULTILINE)
            found += re.findall(r"^ *Example: (smalti .*)$", block, re.MULTILINE)
    return sorted(set(found))


def named() -> list[str]:
    """Commands named in running text, such as `smalti eval run`; `a|b` stands for two."""
    found = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for words in re.findall(r"`smalti ((?:[a-z|-]+ ?)+)[^`]*`", text):
            first, _, rest = words.strip().partition(" ")
            found |= {f"{verb} {way}".strip() for verb in first.split("|") for way in rest.partition(" ")[0].split("|")}
    return sorted(found)


def parse(words: list[str]) -> None:
    """Walk down to the command and parse its arguments; raises where they are not taken."""
    assert words[0] in VERBS, f"'{words[0]}' is not a verb of smalti --help"
    command = reference.command_of(words[0])
    assert command is not None, f"smalti/cli/{words[0]}.py does not exist"
    name, rest, parent = words[0], words[1:], None
    while True:
        is_group = hasattr(command, "list_commands")
        if rest == ["--help"]:
            return
        if hasattr(command, "with_command"):
            rest = command.with_command(rest)
        context = command.make_context(name, rest[:1] if is_group else list(rest), parent=parent)
        if not is_group:
            return
        assert rest, f"'{name}' wants one of {', '.join(command.list_commands(context))}"
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"'{rest[0]}' is none of {', '.join(command.list_commands(context))}"
        command, name, rest, parent = inner, rest[0], rest[1:], context


def last_words_of_the_demo() -> list[str]:
    """The next commands that the demo prints at its end."""
    from smalti.cli import demo

    return [re.split(r" {2,}", line)[0] for line in demo._next_steps().splitlines() if line.startswith("smalti ")]


@pytest.mark.parametrize("line", sorted({*shown(), *last_words_of_the_demo()}))
def test_shown_command_is_taken(line):
    line = re.split(r" (?:[|>]|&&|#) ?", line)[0]
    words = shlex.split(line)[1:]
    parse(words)
    if words[0] == "train":
        for key in re.findall(r" ([a-z][a-z_.0-9]*)=", line):
            key = re.split(r"\.\d", key)[0]  # what lies in a list is named by its number
            assert key in KEYS, f"'{key}' is not a key of a run's config"


@pytest.mark.parametrize("words", named())
def test_named_command_exists(words):
    verb, *rest = words.split()
    assert verb in VERBS, f"'{verb}' is not a verb of smalti --help"
    command = reference.command_of(verb)
    if rest and hasattr(command, "list_commands"):
        assert rest[0] in reference.subcommands(command, reference.context_of(command, verb))


def test_every_help_page_shows_an_example():
    for name, command, context in reference.leaves():
        assert f"Example: {name}" in " ".join(command.get_help(context).split()), name


_KEY = re.compile(r"`((?:train|data|model|track|profile)\.[a-z_0-9.]+)(?:[=:][^`]*)?`")
_METRIC = re.compile(
    r"`((?:loss|metrics|l2_norm|moe|time|throughput|memory|ckpt|system|lr-\w+|data/(?:mix|fetch))/[^` ]+)`"
)
_PYTHON = {"model.safetensors", "model.config", "model.decoder"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_keys_and_metrics_named_in_running_text_exist(page):
    if page.name in ("CHANGELOG.md", "log.md") or page.parent.name == "decisions":
        return  # of their time
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    parents = {key.rpartition(".")[0] for key in KEYS}
    assert {key.rstrip(".") for key in _KEY.findall(text)} <= KEYS | parents | _PYTHON
    published = {row.name for row in TABLE}
    for name in set(_METRIC.findall(text)) - published:
        metric(name)
