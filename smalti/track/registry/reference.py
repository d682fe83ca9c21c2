"""References to registered models: ``models:/demo/3``, ``models:/demo@production``, ``models:/demo`` (the newest)."""

import re
from dataclasses import dataclass

from smalti.base.errors import UserError

PREFIX = "models:/"
ALLOWED = "models:/NAME/NUMBER, models:/NAME@TAG, or models:/NAME (the newest version)"
_REFERENCE = re.compile(r"(?P<name>[^/@:]+)(/(?P<number>\d{1,9})|@(?P<tag>[^/@:]+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TAG = re.compile(r"(?!(v\d+|latest)$)[a-z][a-z0-9_-]{0,99}", re.IGNORECASE)
"""As MLflow's aliases, which may be neither ``latest`` nor ``v3`` either."""


@dataclass(frozen=True)
class Reference:
    """A version by its number or tag; by neither, the newest."""

    name: str
    number: int | None = None
    tag: str | None = None

    @property
    def text(self) -> str:
        """The reference without its prefix."""
        if self.number is not None:
            return f"{self.name}/{self.number}"
        return self.name if self.tag is None else f"{self.name}@{self.tag}"


def is_reference(text: str) -> bool:
    """Return whether a model argument is a reference, and not a path."""
    return text.startswith(PREFIX)


def parse(text: str) -> Reference:
    """Return a reference, with or without its prefix. Raises UserError for text of another form."""
    match = _REFERENCE.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        raise UserError(f"'{text}' is not a reference to a registered model", allowed=ALLOWED, hint="smalti models ls")
    number = match["number"]
    return Reference(match["name"], None if number is None else int(number), match["tag"])


def check_name(name: str) -> None:
    """Raise UserError for a name that no model may have."""
    if not _NAME.fullmatch(name):
        hint = re.sub("[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "mine"
        raise UserError(
            f"'{name}' cannot be the name of a model",
            allowed="letters, digits, dots, dashes and underscores, a letter or digit first, 100 at most",
            hint=f"--name {hint}",
        )


def check_tag(tag: str) -> None:
    """Raise UserError for a word that cannot be a tag."""
    if not _TAG.fullmatch(tag):
        raise UserError(
            f"'{tag}' cannot be a tag",
            allowed="a word of letters, digits, dashes and underscores that begins with a letter; not latest or v3",
            hint="candidate, production; models:/NAME is the newest version without a tag",
        )
