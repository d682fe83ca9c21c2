"""Checks the items of tasks against the sources of a run, and writes what was found.

<folder>/contamination.json   for each task the number of items of each status; sources, rules
<folder>/items.jsonl          an item a line (``Judgement.items``), with its task
<folder>/documents.jsonl      the documents that make an item dirty, as ``data.takedowns`` and ``drop_documents`` of
                              'smalti data curate' take them: {"source": NAME, "document": ID or number}
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from smalti.base import clock, store
from smalti.base.progress import Progress, no_progress
from smalti.data.prepare.contamination.index import Search, find_ngrams
from smalti.data.prepare.contamination.scan import KEPT_DOCUMENTS, Hits
from smalti.data.sources.source import Source
from smalti.data.stream.takedowns import Takedowns
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokens.document_ids import IDS_NAME, ids_of
from smalti.evals.contamination.judge import (
    COMMON_WORDS,
    COVERED_FRAC,
    RARE_DOCUMENTS,
    Document,
    Judgement,
    judge,
)
from smalti.evals.contamination.questions import TEMPLATE_FRAC, TEMPLATE_ITEMS, Question, QuestionNgrams

NAME = "contamination.json"
ITEMS_NAME = "items.jsonl"
DOCUMENTS_NAME = "documents.jsonl"


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    judgements: Mapping[str, Judgement]
    """By task."""
    search: Search

    def documents(self) -> list[Document]:
        """Return all documents that make an item dirty, by source and number."""
        return sorted({document for judgement in self.judgements.values() for document in judgement.documents})


def check(
    questions: Mapping[str, Sequence[Question]],
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    index: str | Path,
    *,
    takedowns: Takedowns | None = None,
    progress: Progress = no_progress,
) -> Check:
    """Search the documents of ``sources`` for the questions of each task; ``index`` is the folder of the stored index.

    Documents that are taken down do not count: they are not learned.
    """
    ngrams = {task: QuestionNgrams.of(task_questions) for task, task_questions in questions.items()}
    wanted = np.concatenate([np.empty(0, np.uint64), *(grams.hashes for grams in ngrams.values())])
    search = find_ngrams(wanted, sources, tokenizer, index, progress)
    if takedowns is not None:
        search = _without(search, sources, takedowns)
    return Check({task: judge(grams, search) for task, grams in ngrams.items()}, search)


def write(
    result: Check,
    sources: Mapping[str, Source],
    output: str | Path,
    *,
    documents: str | Path | None = None,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Write the result to ``output/<UTC time>/``; returns what contamination.json holds, and the folder.

    ``documents``: another path for the list of documents. ``digests``: task -> SHA-256 of its file.
    """
    time = clock.utc_text().replace(":", "-")
    names = chain([time], (f"{time}-{number}" for number in count(2)))
    folder = next(path for name in names if not (path := Path(output) / name).exists())
    listed = documents or folder / DOCUMENTS_NAME
    record = {
        "time": clock.utc_text(),
        "tasks": {
            task: {**judgement.counts(), "sha256": digests[task]} for task, judgement in result.judgements.items()
        },
        "n_documents": len(result.documents()),
        "scanned_tokens": result.search.scanned_tokens,
        "total_tokens": result.search.total_tokens,
        "sources": {name: {"path": source.where, "digest": source.digest} for name, source in sources.items()},
        "rules": {
            "rare_documents": RARE_DOCUMENTS,
            "covered_frac": COVERED_FRAC,
            "common_words": COMMON_WORDS,
            "kept_documents": KEPT_DOCUMENTS,
            "template_items": TEMPLATE_ITEMS,
            "template_frac": TEMPLATE_FRAC,
        },
    }
    lines = [{"task": task, **item} for task, judgement in result.judgements.items() for item in judgement.items]
    store.make_folder(folder)
    _write_lines(listed, _named(result.documents(), sources))
    _write_lines(folder / ITEMS_NAME, lines)
    store.write_json(folder / NAME, record)
    return {**record, "folder": str(folder), "documents": str(listed)}


def _named(documents: Sequence[Document], sources: Mapping[str, Source]) -> list[dict[str, Any]]:
    """Return the documents with their ids, where the tokens have ids."""
    lines: list[dict[str, Any]] = []
    for name, source in sources.items():
        numbers = [document.document for document in documents if document.source == name]
        has_ids = numbers and store.exists(store.join(source.where, IDS_NAME))
        names: Sequence[str | int] = ids_of(source.where, numbers) if has_ids else numbers
        lines += [{"source": name, "document": value} for value in dict.fromkeys(names)]
    return lines


def _without(search: Search, sources: Mapping[str, Source], takedowns: Takedowns) -> Search:
    hits = dict(search.hits)
    for name, spans in takedowns.spans.items():
        if name in hits and len(spans):
            left = ~np.isin(hits[name].documents, sources[name].documents_at(spans[:, 0]))
            hits[name] = Hits(hits[name].hashes[left], hits[name].documents[left])
    return Search(hits, search.scanned_tokens, search.total_tokens)


def _write_lines(path: str | Path, lines: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    store.write_bytes(path, text.encode("utf-8", "surrogatepass"))
