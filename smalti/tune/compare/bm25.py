"""BM25: ranks texts by the words that they share with a query.

The score is that of Robertson & Zaragoza (The Probabilistic Relevance Framework, 2009) with Lucene's idf, as bm25s
computes it by default.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

K1, B = 1.5, 0.75
"""How soon further uses of a word stop to count, and how much long texts are discounted."""


def words(text: str) -> list[str]:
    """Return the words of a text, without case."""
    return re.findall(r"\w+", text.casefold())


class Bm25:
    """An index of texts in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], dtype=np.float64)
        self._length_norm = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0))
        uses: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, n in count.items():
                uses.setdefault(word, []).append((number, n))
        self._uses = {word: np.array(pairs, dtype=np.int64) for word, pairs in uses.items()}

    def nearest(self, query: str, k: int) -> list[int]:
        """Return the numbers of the ``k`` texts of the highest score, the best first; fewer where no word is shared."""
        scores = np.zeros(len(self._length_norm))
        for word in dict.fromkeys(words(query)):
            if word in self._uses:
                texts, n = self._uses[word].T
                idf = np.log1p((len(scores) - len(texts) + 0.5) / (len(texts) + 0.5))
                scores[texts] += idf * n / (n + self._length_norm[texts])
        best = np.argsort(-scores, kind="stable")[:k]
        return [int(number) for number in best if scores[number] > 0]
