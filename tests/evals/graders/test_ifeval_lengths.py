"""Verifiers of length and repetition: ten passing and ten failing responses each, and those where verdicts differ."""

import pytest
from ifeval_examples import Examples, check_examples

EXAMPLES: dict[str, list[Examples]] = {
    "length_constraints:number_words": [
        Examples(
            {"num_words": 4, "relation": "at least"},
            passing=[
                "one two three four",
                "A b c d e.",
                "1 2 3 4",
                "one\ntwo\nthree\nfour",
                "It is, so, there!",
                "I don't, you don't",
            ],
            failing=["one two three", "word", "- - - -", "a, b", "... one ... two ..."],
            official_only=["It's well-known", "a/b c/d", "यह हिन्दी है", "one-two-three-four"],
        ),
        Examples(
            {"num_words": 4, "relation": "less than"},
            passing=["one two three", "a", "- a - b -", "1 2 3", "Yes, no!"],
            failing=["one two three four", "a b c d e f", "1. 2. 3. 4.", "x\ny\nz\nw", "It is not so."],
            fixed_only=["It's well-known", "a/b c/d e/f", "don't won't"],
        ),
    ],
    "length_constraints:number_sentences": [
        Examples(
            {"num_sentences": 3, "relation": "at least"},
            passing=[
                "One here. Two here. Three here.",
                "What? No! Yes.",
                "It works.\nIt does.\n\nIt will.",
                "all in lowercase. it is. it was.",
                'He said "Go." She went. They left.',
                "I met Dr. Smith. He spoke. I left.",
            ],
            failing=[
                "One here. Two here.",
                "No end mark",
                "Mr. J. Smith of the U.S. Army met Mrs. Jones. It rained.",
                "It costs 3.50 or 4.75 today. Yes.",
                "Wait... then go. Fine.",
                "Really?! No way.",
            ],
            official_only=[
                "1. Buy milk. 2. Go home.",
                "It is short. **Note.**",
                "We need eggs, milk, etc. and bread. Also tea.",
                "We ate (e.g. apples). It was good.",
            ],
            fixed_only=["他来了。他走了。他又来了。", "वह आया। वह गया। वह फिर आया।"],
        ),
        Examples(
            {"num_sentences": 3, "relation": "less than"},
            passing=["One here. Two here.", "Just one.", "no end", "Dr. Smith came.", "A title\n\nOne. Two."],
            failing=[
                "A cat. No dog. Be good.",
                "Go! Go! Go!",
                "One.\n\nTwo.\n\nThree.",
                "Why? Why? Why? Why?",
                "x is. y is. z is.",
            ],
            fixed_only=["1. Buy milk.\n2. Go home.", "**Bold.**\n**Again.**"],
        ),
    ],
    "length_constraints:number_paragraphs": [
        Examples(
            {"num_paragraphs": 2},
            passing=[
                "One\n***\nTwo",
                "One\n\n***\n\nTwo",
                "***\nOne\n***\nTwo",
                "One\n***\nTwo\n***",
                "One line\nand more\n***\nTwo",
                "One\n  ***  \nTwo",
                "# A\ntext\n***\n# B\ntext",
                "*it* is\n***\n*it* was",
                "***\nOne\n***\nTwo\n***\n",
                "1\n***\n2",
            ],
            failing=[
                "One",
                "One\n\nTwo",
                "One\n***\nTwo\n***\nThree",
                "One\n***",
                "One\n***\n***\nTwo",
                "One\n******\nTwo",
                "One\n---\nTwo",
                "One\n**\nTwo",
                "***",
                "One * * * Two",
            ],
            official_only=["One *** Two", "It is ***bold", "***a***b", "One***Two"],
            fixed_only=["One is ***bold*** here\n***\nTwo"],
        )
    ],
    "length_constraints:nth_paragraph_first_word": [
        Examples(
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            passing=[
                "First.\n\nThen second.",
                "First.\n\nthen second.",
                "First.\n\nTHEN, second.",
                "First.\nStill first.\n\nThen! second",
                'First.\n\n"Then" second.',
                "First.\n\n'Then' second.",
                "First.\n\n  Then second.",
                "First.\n\nThen\nsecond.",
                "First.\n\nThen.",
                "First.\n\nThen second.\n\n",
            ],
            failing=[
                "Then first.\n\nSecond.",
                "First.\n\nSecond then.",
                "Then only.",
                "First.\nThen second.",
                "First.\n\nThen second.\n\nThird.",
                "First.\n\nThenceforth.",
                "First.\n\nSecond.\n\nThen.",
                "First.\n\nAnd then.",
                "First.\n\nThe n.",
                "Then.\n\nThan.",
            ],
            official_only=["First.\n\nThen's not.", "First.\n\nThen.second"],
            fixed_only=[
                "\n\n\n\nFirst.\n\nThen second.",
                "First.\n\n\n\nThen second.",
                "First.\n\nThen: second.",
                "First.\n\n**Then** second.",
                "First.\n \nThen second.",
            ],
        ),
        Examples(
            {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "Dear friend"},
            failing=["Dear all", "Friend"],
            fixed_only=["Dear friend, hello.", "dear Friend"],
        ),
        Examples(
            {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "it"},
            passing=["It is."],
            official_only=["It's so."],
        ),
    ],
    "combination:two_responses": [
        Examples(
            passing=[
                "One\n******\nTwo",
                "One******Two",
                "One\n\n******\n\nTwo\n\nand more",
                "******\nOne\n******\nTwo",
                "One\n******\nTwo\n******",
                "Yes. ****** No.",
                "1\n******\n2",
                "A b\n******\nb A",
                "a *b*\n******\nc",
                "One\n*******\nTwo",
            ],
            failing=[
                "One",
                "One\n***\nTwo",
                "One\n******\nOne",
                "One\n******",
                "A\n******\nB\n******\nC",
                "One\n************\nTwo",
                "One\n------\nTwo",
                "One\n*****\nTwo",
                "******",
                "One\n******\n  One  ",
            ],
            official_only=["One\n******\none", "One.\n******\nOne!", "One two\n******\nOne  two"],
        )
    ],
    "combination:repeat_prompt": [
        Examples(
            {"prompt_to_repeat": "Name a  city.\nBe short."},
            passing=[
                f"Name a  city.\nBe short.{rest}"
                for rest in (
                    " Oslo",
                    "\nOslo",
                    "\n\nOslo is one.",
                    " 1",
                    "\n- Oslo",
                    " Name a  city.\nBe short.",
                    "\n***\nOslo",
                    " Answer: Oslo.",
                    '\n"Oslo"',
                    "\n\n\nOslo",
                )
            ],
            failing=[
                "Oslo",
                "Oslo. Name a  city.\nBe short.",
                "Name a  city.",
                "Name one city. Be short. Oslo",
                '"Name a  city.\nBe short." Oslo',
                "Request: Name a  city.\nBe short.\nOslo",
                "Name a city",
                "Be short. Name a city.",
                "**Name a  city.\nBe short.** Oslo",
                "Name a cíty.\nBe short. Oslo",
            ],
            official_only=[
                "Name a  city.\nBe short.",
                "NAME A  CITY.\nBE SHORT. Oslo",
                "name a  city.\nbe short. Oslo",
            ],
            fixed_only=["Name a city. Be short. Oslo", "Name a city.\n\nBe short.\n\nOslo"],
        )
    ],
}


@pytest.mark.parametrize("instruction_id", sorted(EXAMPLES))
def test_verdicts_on_lengths(instruction_id: str) -> None:
    check_examples(instruction_id, EXAMPLES[instruction_id])
