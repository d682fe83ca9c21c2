"""The error of a parser. Imported by the child processes of ``isolated``, which start fast without Arrow."""


class Unreadable(Exception):
    """A file, page or message cannot be read: the rule that drops it, and why."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(rule, reason)
        self.rule = rule
        self.reason = reason


def too_large(limit_bytes: int, what: str = "it") -> Unreadable:
    """Return the error of something that decompresses to more than ``limit_bytes``."""
    return Unreadable("extract/too-large", f"{what} decompresses to more than {limit_bytes:,} bytes (max_file_bytes)")
