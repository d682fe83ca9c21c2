"""Documents without Debian's packages: sources and docstrings of the installed Python, and synthetic prose."""

import html
import json
import random
import tempfile
from pathlib import Path

from planted_documents import LANGUAGES, prose

from build_planted.document import Document
from smalti.data.documents.installed_python import write_documents

_CHARACTERS = 1200


def documents(n: int, seed: int) -> list[Document]:
    """Return about ``n`` documents; a third of them prose in six languages, of which Russian is not wanted."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        write_documents(folder)
        code, docstrings = (
            [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]
            for name in ("code", "prose")
        )
    listed = [Document("code", row["id"].removesuffix(".py") + ".py", "code", None, None, row["text"])
             for row in code if len(row["text"]) < 24_000]  # fmt: skip
    for row in docstrings:
        for number, part in enumerate(_parts(row["text"])):
            listed.append(Document("text", f"{row['id']}.{number}.txt", "prose", "en", None, part))
    for number in range(max(n // 2, 400)):
        language = LANGUAGES[number % len(LANGUAGES)]
        text = "\n".join(prose(rng, language, 2) for _ in range(rng.randint(4, 12)))
        if number % 3:
            name = f"{language}-{number}"
            listed.append(Document("descriptions", name, "prose", language, None, text, f"{number // 4000:02d}.jsonl"))
        else:
            page = f"<html><body><nav>Home</nav><article><p>{html.escape(text)}</p></article></body></html>"
            listed.append(Document("pages", f"{language}/{number}.html", "html", language, None, page))
    return listed


def _parts(text: str) -> list[str]:
    parts: list[str] = [""]
    for paragraph in text.split("\n\n"):
        parts[-1] += paragraph + "\n\n"
        if len(parts[-1]) > _CHARACTERS:
            parts.append("")
    return [part for part in parts if part.strip()]
