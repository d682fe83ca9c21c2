"""The plain chat form."""

import pytest

from smalti.base.errors import UserError
from smalti.data.tokenizer.chat import STOP_TEXTS, render


def test_a_dialogue():
    messages = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    assert render(messages) == "Be brief.\n\nUser: Hi\nAssistant: Hello.\nUser: Bye\nAssistant:"
    assert render(messages, add_generation_prompt=False).endswith("User: Bye")
    assert all(stop in "\n" + render(messages) for stop in STOP_TEXTS)


@pytest.mark.parametrize(
    "message", [{"role": "tool", "content": "x"}, {"role": "user"}, {"content": "x"}, {"role": "user", "content": None}]
)
def test_bad_messages(message):
    with pytest.raises(UserError, match="message 0"):
        render([message])


def test_a_late_system_message():
    with pytest.raises(UserError, match="first one only"):
        render([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
