"""Templates that are unlike the ten families: each gives the right mask, or a clear refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES, Family, byte_level

from smalti.base.errors import DataError, UserError
from smalti.tune.chats import tokenize

GLM = """\
[gMASK]
{%- for message in messages %}
    {{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "</tool_call>", "<|end|>")
CHATML = FAMILIES["chatml"].template
ASK: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TWICE = [*ASK, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_level((*CONTROLS, "<eos>")).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<eos>"}))
    return folder


def in_loss(files: Path, template: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The texts of the runs of tokens in the loss."""
    from tokenizers import Tokenizer

    (files / "t.jinja").write_text(template)
    ids, mask = tokenize(messages, files, template=str(files / "t.jinja"), **options)
    inner = Tokenizer.from_file(str(files / "tokenizer.json"))
    runs: list[list[int]] = [[]]
    for token, flag in zip(ids, mask, strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [inner.decode(run, skip_special_tokens=False) for run in runs if run]


def test_a_stop_token_at_the_beginning_of_the_next_message_is_in_the_loss_of_the_answer(files: Path) -> None:
    assert in_loss(files, GLM, TWICE) == ["b<|user|>", "d<|user|>"]
    assert in_loss(files, GLM, TWICE, last_turn=True) == ["d<|user|>"]
    tool = [*ASK, {"role": "tool", "content": "r"}, {"role": "assistant", "content": ""}]
    assert in_loss(files, GLM, tool) == ["b<|observation|>", "<|user|>"]


def test_turns_that_change_are_refused_and_the_last_one_is_trained(files: Path) -> None:
    thought = [dict(message) for message in TWICE]
    thought[1]["content"] = "<think>hm</think>\n\nb"
    thought[3]["content"] = "<think>so</think>\n\nd"
    with pytest.raises(DataError, match=r"'<think>hm</think>.*' in message 2, and 'b<\|im_end\|>(.|\n)*turns=each"):
        in_loss(files, THINKING, thought)
    assert in_loss(files, THINKING, thought, last_turn=True) == ["<think>so</think>\n\nd<|im_end|>"]
    assert in_loss(files, THINKING, thought[:2]) == ["<think>hm</think>\n\nb<|im_end|>"]
    assert in_loss(files, THINKING, TWICE) == ["b<|im_end|>", "d<|im_end|>"]


def test_calls_of_tools_are_in_the_loss_and_their_results_are_not(files: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert in_loss(files, TOOLS, messages, tools=tools) == ['<tool_call>f{"x": 1}</tool_call><|im_end|>', "b<|im_end|>"]

    as_text = TOOLS.replace("(call.function.arguments | tojson)", "call.function.arguments")
    assert in_loss(files, as_text, messages, tools=tools)[0] == '<tool_call>f{"x": 1}</tool_call><|im_end|>'
    with pytest.raises(DataError, match="does not write tool calls: 'f' is not in its text"):
        in_loss(files, CHATML.replace("message.content", "(message.content or '')"), messages)
    with pytest.raises(DataError, match="does not write tools: 'other' is not in its text"):
        in_loss(files, CHATML, ASK, tools=[{"type": "function", "function": {"name": "other"}}])


@pytest.mark.slow
def test_ends_of_several_tokens_and_repeated_ones(files: Path) -> None:
    double = CHATML.replace("'<|im_end|>\\n'", "'<|end|><|im_end|>\\n'")
    assert in_loss(files, double, TWICE) == ["b<|end|><|im_end|>", "d<|end|><|im_end|>"]
    repeated = CHATML.replace(
        "{%- if add_", "{%- if not add_generation_prompt %}{{- '<|im_end|>' }}{% endif %}{%- if add_"
    )
    assert in_loss(files, repeated, TWICE) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.slow
def test_a_prompt_that_opens_a_thought_is_for_answers_with_thoughts(files: Path) -> None:
    template = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    with pytest.raises(DataError, match=r"ends the prompt for an answer with '<think>"):
        in_loss(files, template, ASK)
    thought = [ASK[0], {"role": "assistant", "content": "<think>\nhm</think>b"}]
    assert in_loss(files, template, thought) == ["hm</think>b<|im_end|>"]


@pytest.mark.slow
def test_empty_answers_weights_and_forged_ends(files: Path) -> None:
    messages = [*ASK, {"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": ""}]
    assert in_loss(files, CHATML, messages) == ["b<|im_end|>", "<|im_end|>"]
    messages[1] = {"role": "assistant", "content": "x<|im_end|>y", "weight": 1}
    assert in_loss(files, CHATML, messages) == ["x<|im_end|>y<|im_end|>", "<|im_end|>"]
    ids, mask = tokenize(messages, files, template=str(files / "t.jinja"))
    assert sum(mask) == len([i for i, m in zip(ids, mask, strict=True) if m])
    messages[1]["weight"] = 0
    assert in_loss(files, CHATML, messages) == ["<|im_end|>"]


@pytest.mark.slow
def test_an_end_token_only_after_the_last_answer_does_not_matter(files: Path) -> None:
    template = CHATML.replace("{%- endfor %}", "{%- if loop.last %}{{- eos_token }}{% endif %}{%- endfor %}")
    template = template.replace("{%- if loop.last %}", "{%- if loop.last and message.role == 'assistant' %}")
    assert in_loss(files, template, TWICE) == ["b<|im_end|>", "d<|im_end|>"]


REFUSED = {
    "no generation prompt": (CHATML.partition("{%- if add")[0], r"no generation prompt, but writes '<\|im_start\|>"),
    "another prompt": (CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif"), r"'<think>'"),
    "no end": ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "would not learn to stop"),
    "no answers": ("{{ messages[0].content }}", "does not write the answers"),
    "no system": ("{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML, "no system"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_a_template_without_an_exact_mask_is_refused(name: str, files: Path) -> None:
    template, words = REFUSED[name]
    if name == "no end":
        template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(UserError, match=words):
        in_loss(files, template, [{"role": "system", "content": "s"}, *ASK])


def test_messages_that_are_wrong_are_named(files: Path) -> None:
    for messages, words in (
        ([], "there are no messages"),
        ([{"role": "user", "content": "a"}], "no message is of the assistant"),
        ([{"role": "bot", "content": "a"}], "message 1 has the role 'bot'"),
        ([{"role": "user", "content": 7}], "content of message 1 is int"),
        ("a", "the messages are str"),
    ):
        with pytest.raises(DataError, match=words):
            tokenize(messages, files, template="chatml")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has no chat template(.|\n)*template=chatml"):
        tokenize(ASK, files)
    with pytest.raises(UserError, match="there is no template 'chatlm'"):
        tokenize(ASK, files, template="chatlm")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from chat_families import CONVERSATION, write_folder

    transformers = pytest.importorskip("transformers")
    family: Family = FAMILIES[name]
    folder = write_folder(family, tmp_path / name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = CONVERSATION if family.has_system else CONVERSATION[1:]
    for n in (2, 4):
        part = messages[: len(messages) - 4 + n]
        assert tokenize(part, folder)[0] == theirs.apply_chat_template(part, return_dict=False)
