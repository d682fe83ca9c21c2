"""Verifiers of words and letters: ten passing and ten failing responses each, and those where the verdicts differ."""

# ruff: noqa: RUF001 (letters and marks of other scripts are meant)

import pytest
from ifeval_examples import Examples, check_examples

EXAMPLES: dict[str, list[Examples]] = {
    "keywords:existence": [
        Examples(
            {"keywords": ["river", "stone"]},
            passing=[
                "The river washed over the stone.",
                "River and Stone",
                "RIVER STONE",
                "A stone, thrown into a river.",
                "river-stone",
                "(river) [stone]",
                "**river** and *stone*",
                "The stone's shadow fell on the river's edge.",
                "stone\nriver",
                "1. river 2. stone 3. river",
            ],
            failing=[
                "The river is wide.",
                "A stone is hard.",
                "riv er st one",
                "Rivulets and pebbles.",
                "The rivre washed over the stone.",
                "nothing at all",
                "river, ston",
                "Stony river",
                "r i v e r s t o n e",
                "Rivière et stone",
            ],
            official_only=["Rivers and stones", "driver and stonework", "the river and many milestones"],
        ),
        Examples(
            {"keywords": ["a.b"]},
            passing=["the file a.b is here"],
            failing=["the file ab is here"],
            official_only=["the file axb is here"],
        ),
        Examples({"keywords": ["c++"]}, passing=["We write C++ today."], official_only=["cccc"]),
        Examples({"keywords": ["(unclosed"]}, fixed_only=["a word (unclosed is here"], failing=["a word"]),
        Examples({"keywords": ["ice cream"]}, passing=["I like ice cream."], fixed_only=["I like ice\ncream."]),
    ],
    "keywords:frequency": [
        Examples(
            {"keyword": "war", "frequency": 2, "relation": "at least"},
            passing=["war and war", "War! War!", "war, WAR, war", "The war after the war.", "war-war", "war\nwar\n"],
            failing=["war", "peace", "w a r", "one war only", "The war. The peace."],
            official_only=["a reward for a warm coat", "Toward the war", "wars and wars"],
        ),
        Examples(
            {"keyword": "fake ", "frequency": 2, "relation": "less than"},
            passing=["fake", "no such word", "It is not fake news.", "FAKE?", "a fak e fake"],
            failing=["fake fake", "Fake, and fake again.", "fake\nfake\nfake", "fake-fake", "'fake' or \"fake\""],
            fixed_only=["The faker made a fake.", "fakes and fakes"],
        ),
        Examples({"keyword": "*args", "frequency": 1, "relation": "at least"}, fixed_only=["It takes *args."]),
    ],
    "keywords:forbidden_words": [
        Examples(
            {"forbidden_words": ["rock", "field"]},
            passing=[
                "A stone.",
                "Rocks and fields.",
                "The rocket flew.",
                "battlefields",
                "bedrock",
                "r o c k",
                "Fielding a question",
                "ro-ck",
                "A plain, a hill",
                "rock_and",
            ],
            failing=[
                "A rock.",
                "ROCK",
                "The field is green.",
                "rock-solid",
                "rock's edge",
                "(field)",
                "*rock*",
                "rock",
                "Field",
                "one\nrock\ntwo",
            ],
        ),
        Examples({"forbidden_words": ["c#"]}, passing=["We write Rust."], official_only=["We write C# here."]),
        Examples({"forbidden_words": ["hello world"]}, failing=["Say hello world."], official_only=["hello\nworld"]),
        Examples({"forbidden_words": ["कर"]}, passing=["यह है"], failing=["यह कर है"], fixed_only=["यह करो"]),
        Examples({"forbidden_words": ["(x"]}, fixed_only=["no such text"], failing=["here (x stands"]),
    ],
    "keywords:letter_frequency": [
        Examples(
            {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
            passing=["quiet queen", "QQ", "Qatar, q", "q and q and q", "unique quest"],
            failing=["queen", "none here", "Q", "a b c", "0123"],
        ),
        Examples(
            {"letter": "O", "let_frequency": 3, "let_relation": "less than"},
            passing=["two", "no OK", "nothing", "aeiu", "o 0 o"],
            failing=["foot of", "OOO", "Ooo", "hello world of", "o\no\no"],
        ),
        Examples({"letter": "#", "let_frequency": 2, "let_relation": "at least"}, passing=["#a #b"], failing=["#a"]),
        Examples({"letter": "!", "let_frequency": 2, "let_relation": "less than"}, passing=["Hi!"], failing=["Hi!!"]),
    ],
    "language:response_language": [
        Examples(
            {"language": "de"},
            passing=["Das ist ein kurzer Satz und er ist auf Deutsch.", "Wir gehen heute nicht in die Stadt."],
            failing=["This is a short sentence and it is in English.", "हम आज शहर नहीं जा रहे हैं।"],
            official_only=[
                "Das ist ein langer Satz, und er ist auf Deutsch, weil wir das so wollen und nicht anders.\n\n"
                "This is a sentence in English, and it is here.",
                "42",
            ],
        ),
        Examples(
            {"language": "hi"},
            passing=["यह एक छोटा वाक्य है और यह हिन्दी में है।", "नमस्ते"],
            failing=["हे एक छोटे वाक्य आहे आणि ते मराठीत आहे.", "Yeh hindi mein hai.", "यो नेपाली भाषा हो र यो पनि छ।"],
        ),
        Examples(
            {"language": "mr"},
            passing=["हे एक छोटे वाक्य आहे आणि ते मराठीत आहे."],
            failing=["यह वाक्य हिन्दी में है और मराठी में नहीं।"],
        ),
        Examples(
            {"language": "ne"}, passing=["यो नेपाली भाषा हो र यो पनि राम्रो छ।"], failing=["यह हिन्दी है और यह भी है।"]
        ),
        Examples(
            {"language": "ko"},
            passing=["오늘은 날씨가 좋습니다."],
            failing=["今日は天気がいいです。", "It is sunny and warm."],
        ),
        Examples({"language": "ja"}, passing=["今日は天気がいいです。"], failing=["오늘은 날씨가 좋습니다."]),
        Examples(
            {"language": "ru"},
            passing=["Это предложение на русском, и оно не о погоде."],
            failing=["Това е изречение на български и не е за времето."],
        ),
        Examples(
            {"language": "bg"},
            passing=["Това е изречение на български и не е за времето."],
            failing=["Это предложение на русском, и оно не о погоде."],
        ),
        Examples(
            {"language": "fa"},
            passing=["این یک جمله است و به زبان فارسی است."],
            failing=["هذه جملة من اللغة العربية و هي في كتاب."],
        ),
        Examples(
            {"language": "ur"},
            passing=["یہ اردو کا ایک جملہ ہے اور اس میں کچھ نہیں ہے۔"],
            failing=["این یک جمله است و به زبان فارسی است."],
        ),
        Examples({"language": "ar"}, passing=["هذه جملة في اللغة العربية و هي من كتاب."]),
        Examples({"language": "pt"}, passing=["Esta frase não é em inglês, mas é uma frase para você."]),
        Examples({"language": "it"}, passing=["Questa non è una frase in inglese, ma è una frase per te."]),
        Examples({"language": "sw"}, passing=["Hii ni sentensi ya Kiswahili na si ya lugha nyingine."]),
        Examples({"language": "vi"}, passing=["Đây là một câu tiếng Việt và không có từ nào khác."]),
        Examples({"language": "fi"}, passing=["Tämä on lause, joka on suomeksi, ja se ei ole pitkä."]),
        *(
            Examples({"language": language}, passing=[text], failing=["This is in English and not in that."])
            for language, text in {
                "kn": "ಇದು ಕನ್ನಡ ವಾಕ್ಯ.",
                "pa": "ਇਹ ਪੰਜਾਬੀ ਹੈ।",
                "gu": "આ ગુજરાતી છે.",
                "te": "ఇది తెలుగు.",
                "ta": "இது தமிழ்.",
                "th": "นี่คือภาษาไทย",
                "bn": "এটি বাংলা।",
            }.items()
        ),
    ],
    "change_case:english_capital": [
        Examples(
            passing=[
                "THIS IS THE ANSWER AND IT IS SHORT.",
                "YES",
                "I AM HERE, AND YOU ARE THERE.",
                "THE 3 CATS OF 1999!",
                "DON'T DO THAT IN THE GARDEN.",
                "WE ARE THE ONES WHO KNOW.\n\nTHEY ARE NOT THE ONES.",
                "* THE FIRST POINT\n* AND THE SECOND",
                "HELLO WORLD",
                '"IT IS WHAT IT IS."',
                "A B C OF THE E-MAIL TO YOU",
            ],
            failing=[
                "This is the answer.",
                "THIS IS THE ANSWEr AND IT IS SHORT.",
                "this is it",
                "123",
                "DAS IST NICHT DIE ANTWORT, UND ES IST AUF DEUTSCH.",
                "ЭТО НЕ НА АНГЛИЙСКОМ И НЕ ТО",
                "!!!",
                "THE END of it",
                "NO, it is not",
                "이것은 영어가 아니다",
            ],
            official_only=[
                "THIS IS THE LONG PART OF THE ANSWER, AND IT IS IN THE ENGLISH THAT WE ALL KNOW AND LIKE.\n\n"
                "UND DAS IST DER TEIL, DER NICHT AUF ENGLISCH IST.",
            ],
        )
    ],
    "change_case:english_lowercase": [
        Examples(
            passing=[
                "this is the answer and it is short.",
                "yes",
                "i am here, and you are there.",
                "the 3 cats of 1999!",
                "don't do that in the garden.",
                "we are the ones who know.\n\nthey are not the ones.",
                "- the first point\n- and the second",
                "hello world",
                '"it is what it is."',
                "a, b and c of the e-mail to you",
            ],
            failing=[
                "This is the answer.",
                "this is the Answer and it is short.",
                "THIS IS IT",
                "123",
                "das ist nicht die antwort, und es ist auf deutsch.",
                "это не на английском и не то",
                "?!",
                "the end of IT",
                "i told the NASA",
                "이것은 영어가 아니다",
            ],
            official_only=[
                "this is the long part of the answer, and it is in the english that we all know and like.\n\n"
                "und das ist der teil, der nicht auf englisch ist.",
            ],
        )
    ],
    "change_case:capital_word_frequency": [
        Examples(
            {"capital_frequency": 2, "capital_relation": "at least"},
            passing=[
                "NASA and ESA",
                "HELLO WORLD",
                "**BOLD** and BIG",
                "U.S. and U.K.",
                "(FBI), [CIA]",
                "WELL-KNOWN FACT",
            ],
            failing=["NASA", "Nasa and Esa", "no capitals", "I", "WELL-KNOWN"],
            official_only=["I think I know", "A plan, a Plan, and A", "DON'T", "R&D", "I met NASA", "YOU'RE"],
        ),
        Examples(
            {"capital_frequency": 2, "capital_relation": "less than"},
            passing=["Only NASA is here.", "none here", "Nasa", "one TWO three", "nAsA"],
            failing=["NASA ESA", "STOP. GO.", "IT WAS HIM", "A BIG ONE", "YES, NO"],
            fixed_only=["I know that I know", "DON'T say it", "A cat and I"],
        ),
    ],
    "punctuation:no_comma": [
        Examples(
            passing=[
                "No mark.",
                "A; B",
                "one two",
                "x. y. z.",
                "a-b",
                "semi;colon",
                "dash - here",
                "'quote'",
                "1.000",
                "one\ntwo",
            ],
            failing=["a, b", ",", "1,000", "Yes,", "one,two", '"Hi," he said', "a ,b", "line\n, line", ",,", "x;,y"],
            official_only=["你好，世界", "a، b", "一、二", "日本、中国"],
        )
    ],
    "startend:end_checker": [
        Examples(
            {"end_phrase": "Is there anything else?"},
            passing=[
                "Hello. Is there anything else?",
                "Is there anything else?",
                "Text\n\nIs there anything else?",
                "Text Is there anything else?\n",
                '"Text. Is there anything else?"',
                "  Is there anything else?  ",
                "text. is there anything else?",
                "TEXT. IS THERE ANYTHING ELSE?",
                "One.\nTwo.\nIs there anything else?",
                "(Is there anything else?) Is there anything else?",
            ],
            failing=[
                "Hello.",
                "Is there anything else? No.",
                "Is there anything else",
                "Is there anything more?",
                "Is there anything else?!",
                "anything else?",
                "Is there anything else? :)",
                "Isthere anything else?",
                "Is there anything  else?",
                "Is there anything else?\n\nBye",
            ],
            official_only=["Hello. is there anything else?", "This there anything else? This Is There Anything Else?"],
            fixed_only=["“Hello. Is there anything else?”", "'Hello. Is there anything else?'"],
        ),
        Examples(
            {"end_phrase": "in India."},
            passing=["It is in India."],
            official_only=["We remain in India. Again in india."],
        ),
        Examples({"end_phrase": "Art"}, passing=["It is Art"], official_only=["He is smArt"]),
    ],
    "startend:quotation": [
        Examples(
            passing=[
                '"Hello."',
                '"a"',
                ' "Hello there" ',
                '"One.\n\nTwo."',
                "\"He said 'yes'.\"",
                '"1"',
                '\n"Text"\n',
                '"A "quoted" word"',
                '"*bold*"',
                '"<<title>>\ntext"',
            ],
            failing=[
                "Hello.",
                '"Hello.',
                'Hello."',
                "'Hello.'",
                '"',
                '"Hello." she said',
                'He said "yes"',
                "``Hello''",
                "«Hello»",
                '*"Hello"*',
            ],
            official_only=['""', '" "', '"\n"'],
            fixed_only=["“Hello.”", "„Hallo.“", "„Hej.”"],
        )
    ],
}


@pytest.mark.parametrize("instruction_id", sorted(EXAMPLES))
def test_verdicts_on_words(instruction_id: str) -> None:
    check_examples(instruction_id, EXAMPLES[instruction_id])
