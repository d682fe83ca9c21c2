"""Finds the languages that a text may be written in, from its script and its most common words; deterministic.

The published checkers use langdetect: character trigrams, random without a seed, without a release since 2021, and
unreliable on text in capital letters. Words decide here, in any case of letters. docs/concepts/evals/ifeval.md has the
measured agreement.
"""

import re
import unicodedata
from collections import Counter

from smalti.evals.graders.ifeval.segments import bare

# ruff: noqa: RUF001 (letters of other scripts are meant)

_OF_SCRIPT = {
    "LATIN": "en de fr es pt it nl sv da no fi et pl cs sk hr sl ro hu tr vi id tl sw so af ca cy sq lt lv",
    "CYRILLIC": "ru bg uk mk",
    "ARABIC": "ar fa ur",
    "DEVANAGARI": "hi mr ne",
    "BENGALI": "bn",
    "GURMUKHI": "pa",
    "GUJARATI": "gu",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "THAI": "th",
    "HEBREW": "he",
    "GREEK": "el",
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh-cn zh-tw ja",
}
LANGUAGES = sorted({language for row in _OF_SCRIPT.values() for language in row.split()})
"""The codes that ``language:response_language`` accepts."""

_COMMON_WORDS = {
    "en": "the and of to in is that it for you was with on as are be this have from or at by not but what all were "
    "when we there can your which their if will an my has his her they i me our she he who how so do its more "
    "about into than a too just such up out some any other them had would could should been these those only "
    "very",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden "
    "aus er hat dass sie nach wird bei einer um am sind noch wie einem über ich wir kann ihr mein war",
    "fr": "le la les de des du et en un une est que dans pour qui il sur pas ne au se plus par avec ce son sont "
    "ils vous nous je mais cette ou être ont leur aux à elle comme d'une c'est",
    "es": "el la los las de del y en un una que es por con para no se su al lo como más pero sus este ha está "
    "son muy también fue o si ya todo esta desde cuando nos hay",
    "pt": "o a os as de do da dos das e em um uma que é para com não no na se por mais como mas ao foi ele são "
    "à pelo pela seu sua ou nos já você eu está muito também isso",
    "it": "il lo la gli le di del della dei delle e in un una che è per con non si da al alla nel nella sono "
    "come più ma anche ha questo questa ci mi ed o se dal sul mia mio",
    "nl": "de het een en van in is dat op te met voor niet zijn aan er om ook als maar dan door bij wordt deze "
    "uit hij nog naar heeft ik je kan worden over",
    "sv": "och i att det som en på är av för med den till inte om ett han har jag var från men de så kan när också ska",
    "da": "og i at det er en til af på som den med for de ikke der har et jeg var han fra men også kan vil blev "
    "være sig",
    "no": "og i det er en til av på som den med for de ikke har et jeg var han fra men også kan vil ble være "
    "seg å etter",
    "fi": "ja on ei että se oli hän mutta ovat kun myös tai joka minä niin kuin sen ole jos mitä mikä ne tämä "
    "vain sitä voi olla hänen kaikki sekä nyt jotka sinä minun",
    "et": "ja on ei et see oli ta kui ka või mis oma aga nii kes ma selle seda siis välja nad olid võib tema",
    "pl": "i w na z się nie do to jest że o jak za od po ale przez co dla są tym czy tego był może oraz już jego ich",
    "cs": "a v na se je že to s z do o i za by pro jako k ale jsou po tak jeho které který být nebo jsem už až si",
    "sk": "a v na sa je že to s z do o i za by pre ako k ale sú po tak jeho ktoré ktorý byť alebo som už až si nie",
    "hr": "i u na je se da za su od s o kao koji što ne to ili nije bi sam ali iz po ima biti koja te ga smo",
    "sl": "in v na je se da za so od z s kot ki ne to ali ni bi sem pa iz po tudi ter še bil lahko pri",
    "ro": "și de în la a cu pe că nu este un o din pentru care mai se sunt ca prin dar sau ale al au fost fi le îi",
    "hu": "a az és hogy nem is egy ez meg van volt de csak már vagy ha el mint még azt ezt kell lehet után sem én",
    "tr": "ve bir bu da de için ile çok olarak daha ne gibi olan var kadar sonra o ben mi ama en her değil şey olduğu",
    "vi": "và của là có không được cho một các trong người với những để khi đã này ở đến như tôi bạn cũng ra từ làm về",
    "id": "yang dan di dengan untuk tidak ini dari dalam adalah itu pada akan ke bisa kami saya anda juga oleh "
    "sebagai ada",
    "tl": "ang ng sa mga na at ay ito ko mo ka hindi para niya siya ako kung may naman lang isang kanyang",
    "sw": "na ya wa kwa ni za katika la cha hii kama hiyo kuwa yake lakini yangu sana au ambayo pia huyo mimi "
    "wewe vya yao kila watu wake hivyo kutoka ili hakuna",
    "so": "oo iyo ka ku waa in la ah waxaa uu aan ee soo ayaa ay si ma leh ugu kale waxay wax",
    "af": "die van en in is dit nie het vir op wat met sy te om as aan ek hy sal was deur kan ons ook maar een",
    "ca": "el la els les de del i en un una que és per amb no es al com més però seva aquest ha són molt també",
    "cy": "y yr yn a i o ar ei mae am ac wedi ni fod gan eu hi bod oedd er cael ond sydd",
    "sq": "të e në dhe një për që me nga është si u i do se më ka nuk janë ose kjo ishte",
    "lt": "ir yra kad į iš su tai kaip ne bet ar jis buvo už apie taip dėl jos jo prie per",
    "lv": "un ir ka no ar uz par kas tas bet kā arī vai pie līdz viņš nav bija to pēc",
    "ru": "и в не на что с по как это он но она из у за от то к его же для а бы так я вы мы или если при о они их",
    "bg": "и на за се да от в е с че са това като не по който ще но или при са аз до си той бъде му ги тя сте как",
    "uk": "і в не на що з та до як це він але вона із у за від то його для а б так я ви ми або якщо при про є й",
    "mk": "и на за се да од во е со дека тоа како не по кој ќе но или при сум до си тој го ги таа беше",
    "ar": "في من على إلى أن هذا التي الذي هذه عن مع ما لا كان هو هي أو كل بعد كما لم قد ذلك بين و يا هل",
    "fa": "و در به از که این را است با برای آن یک های می خود تا بر هم شما ما من اما نیز هر بود شده هستند",
    "ur": "کے میں کی ہے اور سے کا کو پر یہ ہیں نے اس وہ کہ بھی ایک نہیں جو تھا آپ ہم ہو کر لیے تھے",
    "hi": "है के में की को से का और हैं यह पर ने कि भी नहीं हम आप एक तो वह जो था हो कर मैं लिए इस अपने ये साथ",
    "mr": "आहे आणि या ते आहेत हे नाही होते मध्ये तर ही असे मी व एक की तो करण्यासाठी आपण त्या साठी केले काही का हा",
    "ne": "छ र हो यो पनि छन् को मा लाई गर्न भने हुन्छ थियो तथा एक म तपाईं गर्ने त्यो भएको छैन हुन् अनि कि हामी",
}
_WORDS_OF = {language: frozenset(words.split()) for language, words in _COMMON_WORDS.items()}


def possible_languages(text: str) -> frozenset[str]:
    """Return the languages that the script and the common words of ``text`` allow; none for a text without letters.

    The script is that of most letters (Han with any kana is Japanese). Of its languages, those with the most common
    words in the text remain: all of them where none has two, as in names.
    """
    scripts: Counter[str] = Counter()
    for character, count in Counter(filter(str.isalpha, text)).items():
        scripts[unicodedata.name(character, "?").split()[0]] += count
    if scripts["HIRAGANA"] or scripts["KATAKANA"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    known = [script for script, _ in scripts.most_common(1) if script in _OF_SCRIPT]
    languages = _OF_SCRIPT[known[0]].split() if known else []
    if len(languages) < 2:
        return frozenset(languages)
    words = Counter(word for part in text.lower().split() for word in re.split(r"[-–—/]", bare(part)))
    scores = {language: sum(words[word] for word in _WORDS_OF.get(language, frozenset())) for language in languages}
    highest = max(scores.values())
    return frozenset(language for language in languages if highest < 2 or scores[language] == highest)
