"""Languages are recognised without a model: six of them in prose, others in a sentence, and nothing in lists."""
# ruff: noqa: RUF001  (letters of other alphabets are meant)

import random

import pytest
from planted_documents import LANGUAGES, prose

from smalti.config import build as schema
from smalti.data.build.clean.function_words import WORDS
from smalti.data.build.clean.language import identify


@pytest.mark.parametrize("language", LANGUAGES)
def test_prose_of_three_sentences(language):
    rng = random.Random(1)
    found = [identify(prose(rng, language, 3)) for _ in range(200)]
    assert sum(name == language and score >= 0.65 for name, score in found) >= 0.97 * 200


@pytest.mark.parametrize(
    ("language", "text"),
    {
        "it": "Il vecchio mulino si trova vicino al fiume e nessuno nel villaggio ricorda chi lo ha costruito.",
        "pt": "O velho moinho fica junto ao rio e ninguém na aldeia se lembra de quem o construiu.",
        "nl": "De oude molen staat aan de rivier en niemand in het dorp weet nog wie hem heeft gebouwd.",
        "sv": "Den gamla kvarnen står vid floden och ingen i byn minns vem som byggde den.",
        "pl": "Stary młyn stoi nad rzeką i nikt we wsi nie pamięta, kto go zbudował, bo jest bardzo stary.",
        "uk": "Старий млин стоїть біля річки, і ніхто в селі не пам'ятає, хто його збудував.",
        "zh": "老磨坊坐落在河边,村里没有人记得是谁建造的。",
        "ko": "오래된 방앗간은 강가에 서 있고 마을의 아무도 누가 지었는지 기억하지 못한다.",
        "el": "Ο παλιός μύλος βρίσκεται δίπλα στο ποτάμι και κανείς δεν θυμάται ποιος τον έχτισε.",
        "ar": "تقع الطاحونة القديمة بجانب النهر ولا أحد في القرية يتذكر من بناها.",
    }.items(),
)
def test_a_sentence_of_other_languages(language, text):
    assert identify(text)[0] == language


@pytest.mark.parametrize("text", ["", "12 34 56", "qwerty asdf zxcv", "foo bar baz " * 30, "SELECT x FROM y WHERE z"])
def test_what_is_no_language_is_undetermined(text):
    assert identify(text) == ("und", 0.0)


def test_a_mixture_of_two_languages_is_not_confident():
    rng = random.Random(2)
    assert identify(" ".join([prose(rng, "en", 5), prose(rng, "ru", 6)]))[1] < 0.65


def test_all_languages_can_be_named_in_a_recipe():
    assert set(WORDS) <= set(schema.LANGUAGES)
