"""Finds rows of tuning data that hold an item of an evaluation, by the rules of ``smalti eval contamination``."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from smalti.config.examples import ExamplesConfig
from smalti.data.prepare.contamination.index import Search
from smalti.data.prepare.contamination.ngrams import NgramSet, normalised
from smalti.data.prepare.contamination.scan import Hits
from smalti.evals.contamination.judge import judge
from smalti.evals.contamination.questions import QuestionNgrams, questions_of
from smalti.evals.tasks.find import load_task
from smalti.evals.tasks.items import read_items
from smalti.tune.chats.files import ChatRow, read_chats

_BATCH_ROWS = 512
_SOURCE = "examples"


def contaminated_rows(config: ExamplesConfig) -> set[int]:
    """Return the numbers, from 0, of the rows that hold an item of the tasks in ``decontaminate``."""
    grams = [QuestionNgrams.of(questions_of(read_items(load_task(path).config))) for path in config.decontaminate]
    if not grams:
        return set()
    wanted = NgramSet(np.concatenate([task.hashes for task in grams]))
    parts: list[Hits] = []
    batch: list[str] = []
    first = 0
    for text in chain(_texts(read_chats(config)), [None]):
        if text is None or len(batch) == _BATCH_ROWS:
            parts.append(_hits(wanted, batch, first))
            first += len(batch)
            batch = []
        if text is not None:
            batch.append(text)
    search = Search({_SOURCE: Hits.joined(parts)}, 0, 0)
    return {document.document for task in grams for document in judge(task, search).documents}


def _texts(rows: Iterable[ChatRow]) -> Iterable[str]:
    for row in rows:
        conversations = row.chat.conversations if row.chat else ()
        yield "\n".join(message["content"] or "" for messages in conversations for message in messages)


def _hits(wanted: NgramSet, texts: Sequence[str], first: int) -> Hits:
    if not texts:
        return Hits()
    hashes, rows = wanted.find(normalised(pa.array(texts, pa.large_string())))
    return Hits(hashes, first + rows)
