"""Verifiers of layout: ten passing and ten failing responses each, and those where the verdicts differ."""

import pytest
from ifeval_examples import Examples, check_examples

EXAMPLES: dict[str, list[Examples]] = {
    "detectable_content:number_placeholders": [
        Examples(
            {"num_placeholders": 2},
            passing=[
                "[name] and [address]",
                "[a][b]",
                "Dear [name],\n[text]",
                "[Your Name] [Your City] [Date]",
                "([x1]) ([y1])",
                "[name] [name]",
                "**[name]** [email@here]",
                "[insert date here] or [other]",
                "x[a]y[b]z",
                "[première] [deuxième]",
            ],
            failing=[
                "[name]",
                "none",
                "(a) (b)",
                "{a} {b}",
                "<a> <b>",
                "[name",
                "name] [",
                "[a\nb] [c\nd]",
                "]a[ ]b[",
                "[one",
            ],
            official_only=[
                "[] []",
                "- [ ] a\n- [x] b",
                "[1] and [2]",
                "[text](https://a.b) [text](https://c.d)",
                "[name] [ ]",
            ],
        )
    ],
    "detectable_content:postscript": [
        Examples(
            {"postscript_marker": "P.S."},
            passing=[
                "Text.\n\nP.S. More.",
                "Text.\nP.S. More.",
                "Text.\n\np.s. more",
                "Text.\n\n**P.S.** More",
                "Text.\n\nP. S. More",
                "Text.\n\nP.S.: More\nand more",
                "Text.\n\nP.S. More.\n\nBye.",
            ],
            failing=[
                "Text.",
                "Text. PS More.",
                "Text.\n\nP.P.S More.",
                "Text.\n\nPost scriptum: more",
                "PS. x",
                "Text.\n\nP.-S. x",
            ],
            official_only=[
                "The P.S. is missing here.",
                "P.S. More.",
                "Text.\n\nP.S.",
                "Text.\n\nP.P.S. More.",
                "Text.\n\nP.S. More.\n\nA.\n\nB.\n\nC.",
                "He wrote: p.s. call me.",
            ],
        ),
        Examples(
            {"postscript_marker": "P.P.S"},
            passing=["Text.\n\nP.P.S More.", "Text.\n\nP.P.S. More.", "Text.\n\nP. P. S. More", "Text.\n\np.p.s: more"],
            failing=["Text.\n\nP.S. More.", "Text.", "PPS", "Text.\n\nP.P. More", "Text.\n\nPPS: more"],
            official_only=["Text with P.P.S inside.", "Text.\n\nP.P.S."],
        ),
        Examples(
            {"postscript_marker": "Note:"},
            passing=["Text.\n\nNote: more."],
            failing=["Text."],
            official_only=["A note: b"],
        ),
        Examples({"postscript_marker": "(see"}, failing=["Text."], fixed_only=["Text.\n\n(see below"]),
    ],
    "detectable_format:number_bullet_lists": [
        Examples(
            {"num_bullets": 2},
            passing=[
                "* a\n* b",
                "- a\n- b",
                "* a\n- b",
                "Text:\n* a\n* b\nmore",
                "  * a\n  * b",
                "* a\n\n* b",
                "* **a** b\n* c",
                "* a\n    - b",
                "* a *b*\n* c",
                "- a - b\n- c",
            ],
            failing=[
                "* a",
                "* a\n* b\n* c",
                "no list",
                "1. a\n2. b",
                "• a\n• b",
                "a * b\nc * d",
                "**a**\n**b**",
                "- a\n- b\n- c\n- d",
                "a) x\nb) y",
                "** a\n** b",
            ],
            official_only=["* a\n---", "-5\n-6", "*a* b\n*c* d", "* a\n-b"],
            fixed_only=["+ a\n+ b", "---\n* a\n* b\n---", "* a\n* b\n*italic* end"],
        )
    ],
    "detectable_format:constrained_response": [
        Examples(
            passing=[
                "My answer is yes.",
                "My answer is no.",
                "My answer is maybe.",
                "  My answer is yes.  ",
                "Well. My answer is no. It is late.",
                '"My answer is maybe."',
                "**My answer is yes.**",
                "I thought: 2 + 2 is 4.\n\nMy answer is yes.",
                "My answer is no. My answer is no.",
                "(My answer is maybe.)",
            ],
            failing=[
                "Yes.",
                "My answer is yes",
                "my answer is yes.",
                "My answer is: yes.",
                "MY ANSWER IS NO.",
                "My answer is perhaps.",
                "My answer  is no.",
                "The answer is no.",
                "My answer is Yes.",
                "maybe",
            ],
            official_only=[
                "My answer is yes. My answer is no.",
                "My answer is yes.\nMy answer is no.\nMy answer is maybe.",
            ],
        )
    ],
    "detectable_format:number_highlighted_sections": [
        Examples(
            {"num_highlights": 2},
            passing=[
                "*a* and *b*",
                "**a** and **b**",
                "*one two* text *three*",
                "*a*\n*b*",
                "**Title**: text *x*",
                "*a* *b* *c*",
                "(*a*) (*b*)",
                "**a**\n\n**b**",
                "***a*** and ***b***",
                "**bold *it* more** *and*",
            ],
            failing=["*a*", "none", "**a**", "* a\n* b", "_a_ _b_", "** **", "****", "*a\nb*", "a * b", "`a` `b`"],
            official_only=["***a***", "2 * 3 * 4 * 5 * 6", "* a * b * c *"],
            fixed_only=["* *a* b\n* *c* d"],
        )
    ],
    "detectable_format:multiple_sections": [
        Examples(
            {"section_spliter": "Section", "num_sections": 2},
            passing=[
                "Section 1\na\nSection 2\nb",
                "Section 1: a\nSection 2: b",
                "Section1\nSection2",
                "# Section 1\n\n# Section 2",
                "**Section 1**\na\n**Section 2**",
                "  Section 1\n  Section 2",
                '"Section 1\na\nSection 2\nb"',
                "Intro\n\nSection 1\na\n\nSection 2\nb\n\nSection 3",
                "Section 10\nSection 20",
                "*Section 1.* a\n*Section 2.* b",
            ],
            failing=[
                "Section 1\na",
                "none",
                "SECTION 1\nSECTION 2",
                "section 1\nsection 2",
                "Section one\nSection two",
                "Section I\nSection II",
                "Sections 1, 2",
                "Part 1\nPart 2",
                "Section A\nSection B",
                "1. Section\n2. Section",
            ],
            official_only=[
                "See Section 1 and Section 2.",
                "Section 1\nSection 1",
                "SubSection 1\nSection 2",
                "As Section 1 says\nSection 2",
            ],
        ),
        Examples({"section_spliter": "(X", "num_sections": 1}, failing=["X 1"], fixed_only=["(X 1"]),
    ],
    "detectable_format:json_format": [
        Examples(
            passing=[
                "{}",
                "[]",
                '{"a": 1}',
                '  {"a": [1, 2]}\n',
                '```json\n{"a": 1}\n```',
                '```\n{"a": 1}\n```',
                "```JSON\n[1]\n```",
                '{"a": {"b": null}}',
                '[{"a": true}]',
                '```Json\n{"a": "x, y"}\n```',
            ],
            failing=[
                "text",
                "{'a': 1}",
                '{"a": 1,}',
                '{"a": 1} done',
                'Here: {"a": 1}',
                "{a: 1}",
                '{"a": 1',
                '```python\n{"a": 1}\n```',
                '{"a": 1}\n{"b": 2}',
                "[" * 100_000,
            ],
            official_only=["42", '"text"', "null", '{"a": NaN}', '```json\n{"a": 1}', '{"a": 1}\n```'],
            fixed_only=['```jSoN\n{"a": 1}\n```'],
        )
    ],
    "detectable_format:title": [
        Examples(
            passing=[
                "<<Title>>",
                "<<a>>\ntext",
                "text <<A b c>> text",
                "<<Joy>>, <<Grief>>",
                "# <<Title>>",
                "**<<Title>>**",
                "<< Title >>",
                "<<<Title>>>",
                "text\n\n<<1>>",
                '"<<Title>>"',
            ],
            failing=[
                "Title",
                "<Title>",
                "<<Title>",
                "<Title>>",
                "<<>>",
                "<< >>",
                "<<Ti\ntle>>",
                "[[Title]]",
                "«Title»",
                ">>Title<<",
            ],
        )
    ],
}


@pytest.mark.parametrize("instruction_id", sorted(EXAMPLES))
def test_verdicts_on_layout(instruction_id: str) -> None:
    check_examples(instruction_id, EXAMPLES[instruction_id])
