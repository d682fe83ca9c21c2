"""Identifies languages with a fastText file that the user provides, such as lid.176.ftz or GlotLID. No download."""

from typing import Any

from smalti.base.errors import DataError, missing_extra
from smalti.data.build.clean.language import UNDETERMINED, sample

# ISO 639-3, as GlotLID and NLLB label languages, for those that Smalti names by ISO 639-1.
_SHORT = {
    "arb": "ar", "ara": "ar", "bul": "bg", "cat": "ca", "ces": "cs", "dan": "da", "deu": "de", "ell": "el", "eng": "en",
    "spa": "es", "pes": "fa", "fas": "fa", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id",
    "ita": "it", "jpn": "ja", "kor": "ko", "nob": "nb", "no": "nb", "nld": "nl", "pol": "pl", "por": "pt", "ron": "ro",
    "rus": "ru", "swe": "sv", "tha": "th", "tur": "tr", "ukr": "uk", "vie": "vi", "cmn": "zh", "zho": "zh",
    "khm": "km", "lao": "lo", "mya": "my",
}  # fmt: skip


class LanguageModel:
    """A fastText model whose labels are languages."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, path: str) -> "LanguageModel":
        """Load the file. DataError if it is no fastText model with labels."""
        try:
            import fasttext
        except ImportError as error:
            raise missing_extra("fasttext", "fasttext", "language_model", error) from error
        try:
            model = fasttext.load_model(path)
            labels, _ = model.predict("a")
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            raise DataError(
                f"language_model '{path}' cannot be used: {error}",
                allowed="a fastText file with labels of languages, such as lid.176.ftz, lid.176.bin or GlotLID",
                hint="download one and give its path, or leave language_model out",
            ) from error
        if not labels:
            raise DataError(f"language_model '{path}' has no labels", hint="word vectors are no model of languages")
        return cls(model)

    def identify(self, text: str) -> tuple[str, float]:
        """Return the language of a text, and the probability that the model gives it (0..1).

        ISO 639-1 for the languages that Smalti knows, else the label of the model without ``__label__``.
        """
        labels, scores = self._model.predict(" ".join(sample(text).split()), k=1)
        if not labels:
            return UNDETERMINED, 0.0
        label: str = labels[0].removeprefix("__label__")
        return _SHORT.get(label.partition("_")[0], label), min(1.0, float(scores[0]))
