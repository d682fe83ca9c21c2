"""Chat templates that loop or take all memory are ended, and the next prompt is rendered."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer import chat_template as module
from smalti.data.tokenizer.chat import TemplateChat
from smalti.data.tokenizer.chat_template import Conversation, TemplateFailed, TemplateProcess

GOOD = [{"role": "user", "content": "good"}]
EVIL = [{"role": "user", "content": "evil"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "a loop": LOOP,
    "one call in C": "{% set n = messages|length + 6 %}{{ n ** (n ** 9) }}",
    "a text of gigabytes": "{{ ('x' * (messages|length * 10 ** 10))|length }}",
    "doubling": "{% set x = namespace(a='xxxx') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "a list of gigabytes": "{% for i in range(99) %}{% set x = (range(99999)|list) * 99999 %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


def rendered(process: TemplateProcess, messages: list[dict[str, str]]) -> str:
    (texts,) = process.render([Conversation(messages, [(len(messages), True)])])
    if isinstance(texts, TemplateFailed):
        raise texts
    return texts[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_ended_and_the_next_prompt_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    monkeypatch.setattr(module, "MEMORY_BYTES", 128 << 20)
    source = "{% if messages[0].content == 'evil' %}" + BOMBS[name] + "{% endif %}{{ messages[0].content }}"
    chat = TemplateChat(source, "/models/x/chat_template.jinja")
    words = "0.1 s of processor time|128 MiB of memory|recursion"
    for _ in range(2):
        with pytest.raises(UserError, match=rf"the chat template chat_template.jinja does not take .*({words})"):
            chat.render(EVIL)
        assert chat.render(GOOD) == "good"


@pytest.mark.sample(1)
@pytest.mark.parametrize("template", ["{{ 'x' * 10 ** 10 }}", "{{ 7 ** (7 ** 9) }}", LOOP * 100_000])
def test_a_bomb_for_the_compiler_is_not_a_template(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jinja2 computes constants while it compiles."""
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    monkeypatch.setattr(module, "MEMORY_BYTES", 128 << 20)
    try:
        chat = TemplateChat(template, "x")
    except DataError as error:
        assert "processor time" in str(error) or "memory" in str(error)  # noqa: PT017
        return
    with pytest.raises(UserError):  # the compiler gave up, and left it to the rendering
        chat.render(GOOD)


def test_one_process_renders_all_prompts_and_ends_with_its_owner() -> None:
    process = TemplateProcess("{{ messages[0].content }}{{ bos }}", {"bos": "😀<s>"})
    pid = process._process.pid
    results: list[str] = []

    def render(n: int, process: TemplateProcess) -> None:
        results.append(rendered(process, [{"role": "user", "content": f"{n}\ud800"}]))

    threads = [threading.Thread(target=render, args=(n, process)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del thread, threads
    assert sorted(results) == sorted(f"{n}\ud800😀<s>" for n in range(20))
    assert process._process.pid == pid
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_was_killed_is_named_and_replaced() -> None:
    process = TemplateProcess("{{ messages[0].content }}", {})
    process._process.kill()
    with pytest.raises(TemplateFailed, match="its process ended with SIGKILL"):
        rendered(process, GOOD)
    assert rendered(process, GOOD) == "good"


def test_a_batch_of_conversations_with_prefixes_is_rendered_without_those_that_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    source = (
        "{% if messages[0].content == 'evil' %}" + LOOP + "{% endif %}{% if tools %}{{ tools[0].name }}: {% endif %}"
        "{% if messages[0].content == 'odd' %}{{ raise_exception('no') }}{% endif %}"
        "{% for message in messages %}{{ loop.revindex if message.role == 'tool' }}{{ message.content }};{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    process = TemplateProcess(source, {})
    good = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "user", "content": "c"}]
    odd = [{"role": "user", "content": "odd"}]
    prefixes = [(3, False), (1, True), (1, False), (2, False)]
    one = Conversation(good, prefixes)
    results = process.render([one, Conversation(odd, [(1, True)]), Conversation(good, [(1, True)], [{"name": "f"}])])
    assert results[0] == ["a;2b;c;", "a;>", "a;", "a;1b;"]
    assert str(results[1]) == "no"
    assert results[2] == ["f: a;>"]
    first, failed, last = process.render([one, Conversation(EVIL, [(1, True)]), one])
    assert first == last == results[0]
    assert "processor time" in str(failed)
    assert process.render([]) == []


@pytest.mark.slow
def test_the_limit_is_of_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.6)  # of all texts together it would be too little
    process = TemplateProcess("{% for i in range(9999) %}{% for j in range(n) %}{% endfor %}{% endfor %}x", {"n": 10})
    (texts,) = process.render([Conversation(GOOD, [(1, False)] * 40)])
    assert texts == ["x"] * 40


def test_one_ctrl_c_ends_a_loop_and_its_process() -> None:
    code = f"""
import signal
from smalti.data.tokenizer import chat_template
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background may ignore it
chat_template.LIMIT_S = 1000.0
process = chat_template.TemplateProcess({LOOP!r}, {{}})
try:
    print(process._process.pid, flush=True)
    process.render([chat_template.Conversation([], [(0, True)])])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout
    try:
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        assert parent.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        parent.kill()
        parent.stdout.close()


def test_the_line_of_a_syntax_error_is_named() -> None:
    with pytest.raises(TemplateFailed, match="line 3: unexpected end of template"):
        TemplateProcess("{% for message in messages %}\n{{ message.content }}\n{% endfor", {})
