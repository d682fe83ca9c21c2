"""Synthetic prose in six languages, for tests that plant something in it and count what is found."""
# ruff: noqa: RUF001, E501  (letters of other alphabets are meant; wide ones count twice)

import random

_PARTS = {
    "en": (
        "The {n} beside the {m} was {a} for many years, and it {v} when the {o} came|"
        "Nobody in the {n} could say why the {m} {v} so {a} after the {o}|"
        "She had been with the {o} for a {a} summer before the {n} {v} near the {m}|"
        "If you look at the {m}, you will see that its {n} is not {a}, but the {o} {v}",
        "mill tower river garden bridge harbour letter window market forest island teacher farmer engine castle meadow "
        "painter valley lantern orchard kitchen station quarry weaver library",
        "old quiet bright narrow empty heavy green distant broken gentle silver hollow",
        "stopped waited changed vanished returned remained burned slept trembled sang",
    ),
    "de": (
        "Die {n} neben der {m} war für viele Jahre {a}, und sie {v}, als die {o} kam|"
        "Niemand in der {n} konnte sagen, warum die {m} nach der {o} so {a} war und {v}|"
        "Wenn man die {m} ansieht, ist ihre {n} nicht {a}, aber die {o} {v} noch immer",
        "Mühle Brücke Straße Kirche Wiese Werkstatt Küche Insel Burg Laterne Schule Fabrik Quelle Halle Gasse Hütte "
        "Bibliothek Schmiede Scheune Mauer Treppe Kammer",
        "alt still hell schmal leer schwer grün fern kaputt sanft silbern hohl",
        "wartete verschwand brannte schlief zitterte sang blieb fiel ruhte wuchs",
    ),
    "fr": (
        "La {n} à côté de la {m} était {a} depuis des années, et elle {v} quand la {o} est venue|"
        "Personne dans la {n} ne pouvait dire pourquoi la {m} {v} si {a} après la {o}|"
        "Si vous regardez la {m}, vous verrez que sa {n} n'est pas {a}, mais la {o} {v}",
        "rivière maison fenêtre lettre forêt vallée cuisine tour prairie gare église école ferme lanterne rue colline "
        "barque mer place bibliothèque carrière falaise",
        "vieille calme claire étroite vide lourde verte lointaine douce creuse",
        "attendait changeait brûlait dormait tremblait chantait restait tombait",
    ),
    "es": (
        "La {n} que está junto a la {m} fue {a} durante muchos años, y {v} cuando llegó la {o}|"
        "Nadie en la {n} sabía por qué la {m} {v} tan {a} después de la {o}|"
        "Si usted mira la {m}, verá que su {n} no es {a}, pero la {o} {v} todavía",
        "casa torre ventana carta selva cocina pradera estación iglesia escuela granja linterna calle colina barca "
        "plaza biblioteca cantera playa montaña fuente huerta",
        "vieja tranquila clara estrecha vacía pesada verde lejana suave hueca",
        "esperaba cambiaba ardía dormía temblaba cantaba quedaba caía",
    ),
    "ru": (
        "{n} у реки была очень {a}, и она {v}, когда пришла {o} и {m}|"
        "Никто в деревне не знал, почему {m} так {v} после того, как {n} стала {a}, а {o} нет|"
        "Если вы увидите, что {m} не {a}, то {o} и {n} уже {v} для всех",
        "мельница башня лодка школа дорога крепость ферма лампа улица гора кухня станция церковь поляна фабрика "
        "библиотека весна зима стена лестница",
        "старая тихая светлая узкая пустая тяжёлая зелёная далёкая мягкая",
        "ждала менялась горела спала дрожала пела осталась упала",
    ),
    "ja": (
        "{m}のそばにある{n}は長い間{a}ままで、{o}が来たときに{v}。|村の人は誰も、{n}のあとで{m}がなぜ{a}まま{v}のか知らなかった。{o}も同じだった。|"
        "{m}を見ると、その{n}は{a}ものではないが、{o}はまだ{v}。",
        "水車小屋 古い塔 川岸 庭園 石の橋 港町 手紙 窓辺 市場 深い森 小さな島 先生 農家 機関車 城跡 牧草地 画家 谷間 提灯 果樹園 台所 駅舎",
        "静かな 明るい 狭い 空っぽの 重い 緑色の 遠い 壊れた 優しい",
        "止まった 待っていた 変わった 消えた 戻った 燃えた 眠った 震えた 歌った",
    ),
}  # fmt: skip
LANGUAGES = tuple(_PARTS)


def prose(rng: random.Random, language: str = "en", n_sentences: int = 8) -> str:
    """A text of random sentences: no two are near-duplicates."""
    templates, nouns, adjectives, verbs = _PARTS[language]
    things = nouns.split()
    sentences = []
    for _ in range(n_sentences):
        n, m, o = rng.sample(things, 3)
        words = {"n": n, "m": m, "o": o, "a": rng.choice(adjectives.split()), "v": rng.choice(verbs.split())}
        text = rng.choice(templates.split("|")).format(**words)
        sentences.append(text[0].upper() + text[1:] + ("" if text.endswith("。") else "."))
    return ("" if language == "ja" else " ").join(sentences)


def edited(rng: random.Random, text: str, frac: float = 0.05) -> str:
    """The text with this share of its words replaced, at least one."""
    words = text.split()
    for place in rng.sample(range(len(words)), max(1, int(len(words) * frac))):
        words[place] = "".join(rng.choices("abcdefghijklmnop", k=6))
    return " ".join(words)
