r"""The text of a man page in man(7): headings, paragraphs and lists, without fonts and layout.

Not a formatter: registers, strings and macros of the page itself are not expanded, conditions for other devices than
terminals are false, tables are read as lines with tabs. Pages in mdoc(7), the macros of BSD, are not read.
"""

import re

from smalti.data.build.extract.encoding import decode
from smalti.data.build.extract.unreadable import Unreadable

_START = re.compile(r"^[.'][ \t]*(TH|so|Dd)\b", re.MULTILINE)
_COMMENT = re.compile(r"""(?:(?<!\\)\\["#].*|^[.']\\?["#].*)$""")
_NAMES = (
    "aq' dq\" lq“ rq” oq‘ cq’ em— en– hy- bu• co© rs\\ ti~ ha^ ga` mi- bv| ba| at@ sh# Do$ <=≤ >=≥ !=≠ ->→ <-← mu× "  # noqa: RUF001
    "+-± rg® tm™ lB[ rB] lC{ rC} la⟨ ra⟩ Fo« Fc» ssß de° sc§ eu€ Po£ sl/"
)
_CHARACTERS = {item[:2]: item[2:] for item in _NAMES.split()}
_STRINGS = {"lq": "“", "rq": "”", "R": "®", "Tm": "™"}
_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", ":": "\u0308", "~": "\u0303", ",": "\u0327"}
_ESCAPE = re.compile(
    r"\\(?:f(?:\[[^]]*\]|\(..|.)|s(?:[+-]?\d{1,2}|\[[^]]*\]|[+-]?'[^']*')|[mM]\[[^]]*\]|[hvwLlDbxN]'[^']*'"
    r"|(?P<string>\*)(?:\[(?P<s>[^]]*)\]|\((?P<s2>..)|(?P<s1>.))|n[+-]?(?:\[[^]]*\]|\(..|.)"
    r"|\[u(?P<code>[0-9A-F]{4,6})\]|\[(?P<long>[^]]*)\]|\((?P<two>..)|(?P<one>.)|$)"
)
_ONE = {"e": "\\", "-": "-", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", "t": "\t", ".": ".", "\\": "\\"}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_FONTS = frozenset({"B", "I", "R", "SM", "SB", "BR", "BI", "IR", "IB", "RB", "RI"})
_LAYOUT = "PP P LP TP TQ IP HP sp RS RE UR UE MT ME SY YS EX EE nf fi br bp in ti"
_PARAGRAPHS = frozenset(_LAYOUT.split())


def man_text(data: bytes) -> str:
    """Return the text. Raises Unreadable if it is no man page, or only names another one."""
    source = decode(data)[0]
    start = _START.search(source)
    if start is None or start[1] == "Dd":
        what = "it is a man page in mdoc, which is not read" if start else "it is not a man page: it has no .TH"
        raise Unreadable("extract/file", what)
    page = _Page()
    for line in source.replace("\\\n", "").split("\n"):
        page.add(line)
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+(?=\n)", "", "".join(page.parts))).strip()
    if not text:
        raise Unreadable("extract/file", "it has no text of its own (.so names another page)")
    return text


class _Page:
    """The text so far."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._skip_to: str | None = None
        self._is_verbatim = False
        self._held = True  # the condition of the last .ie

    def add(self, line: str) -> None:
        """Add a line of the source."""
        if self._skip_to is not None:
            if line.strip().startswith(self._skip_to):
                self._skip_to = None
            return
        line = _COMMENT.sub("", line)
        if line[:1] not in (".", "'"):
            self._write(_plain(line) if line.strip() else "\n")
            return
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        if name in ("ie", "if", "el"):
            self._conditional(name, rest)
        elif name in ("de", "am", "ig", "de1", "am1"):
            ending = rest.split()[-1] if name != "ig" and len(rest.split()) > 1 else rest if name == "ig" else ""
            self._skip_to = f".{ending or '.'}"
        elif name in ("SH", "SS"):
            self._is_verbatim = False
            self.parts.append(f"\n\n{_plain(' '.join(_arguments(rest)))}\n\n")
        elif name in _FONTS:
            words = _arguments(rest)
            self._write(_plain(("" if len(name) == 2 and name not in ("SM", "SB") else " ").join(words)))
        elif name in _PARAGRAPHS:
            self._layout(name, rest)

    def _write(self, text: str) -> None:
        self.parts.append(text if text.endswith("\n") or not text else text + ("\n" if self._is_verbatim else " "))

    def _conditional(self, name: str, rest: str) -> None:
        match = re.match(r"(!?)([nt])\s+", rest)
        holds = not self._held if name == "el" else match is not None and (match[2] == "n") != bool(match[1])
        self._held = holds if name == "ie" else True
        body = rest[match.end() :] if match else rest
        if body.lstrip().startswith("\\{") or (not match and "\\{" in rest):
            if not holds and "\\}" not in body:
                self._skip_to = ".\\}"
            body = body.lstrip().removeprefix("\\{").removesuffix("\\}")
        if holds:
            self.add(body.lstrip("\\").strip())

    def _layout(self, name: str, rest: str) -> None:
        if name in ("nf", "EX", "fi", "EE"):
            self._is_verbatim = name in ("nf", "EX")
        self.parts.append("\n" if name in ("br", "RE", "fi", "nf", "in", "ti", "TQ") else "\n\n")
        if name in ("IP", "UR", "MT", "SY") and rest:
            self.parts.append(_plain(_arguments(rest)[0]) + " ")


def _arguments(text: str) -> list[str]:
    return [(quoted or word).replace('""', '"') for quoted, word in _ARGUMENT.findall(text.replace("\\ ", "\u00a0"))]


def _plain(text: str) -> str:
    return _ESCAPE.sub(_character, text).replace("\u00a0", " ")


def _character(match: re.Match[str]) -> str:
    if match["string"]:
        return _STRINGS.get(match["s"] or match["s2"] or match["s1"], "")
    if match["code"]:
        return chr(int(match["code"], 16)) if int(match["code"], 16) < 0xD800 else ""
    name = match["long"] or match["two"]
    if name:
        accent = _ACCENTS.get(name[0]) if len(name) == 2 and name[1].isalpha() else None
        return name[1] + accent if accent else _CHARACTERS.get(name, "")
    return _ONE.get(match["one"] or "", "")
