"""The chat templates of Smalti for models without one, and the file that gives a model's folder its template.

ChatML uses the tokens ``<|im_start|>`` and ``<|im_end|>`` where the tokenizer has both as added tokens. Elsewhere its
vocabulary is not extended: ``<|im_start|>`` is plain text, and a turn ends with the tokenizer's end token, at which
generation stops already. Either begins with the tokenizer's ``bos_token``, if it names one.
"""

import json
from pathlib import Path

from smalti.base import store
from smalti.data.tokenizer.chat import TEMPLATE_FILE, template_variables
from smalti.data.tokenizer.encode import Tokenizer

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
_GENERATION = "generation_config.json"

_CHATML = """\
{%- if tools %}{{ raise_exception("this ChatML template has no tools") }}{% endif %}
{{- BEGIN }}
{%- for message in messages %}
    {%- if message.tool_calls %}{{ raise_exception("this ChatML template has no tool calls") }}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + END + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
_NONE = """\
{%- if tools %}{{ raise_exception("without a template there are no tools") }}{% endif %}
{{- BEGIN }}
{%- for message in messages %}
    {%- if message.role != "assistant" and (message.role != "user" or not loop.first) or message.tool_calls %}
        {{- raise_exception("without a template there are only a prompt and its completion") }}
    {%- endif %}
    {{- message.content + (END if message.role == "assistant" else "") }}
{%- endfor %}
"""


def chatml(tokenizer: Tokenizer, folder: str | Path) -> str:
    """Return the ChatML template for this tokenizer."""
    has_tokens = tokenizer.added_tokens.keys() >= {IM_START, IM_END}
    return _filled(_CHATML, folder, IM_END if has_tokens else tokenizer.eod_token)


def joined(tokenizer: Tokenizer, folder: str | Path) -> str:
    """Return the template that joins prompt and completion as they are, with the end token after them."""
    return _filled(_NONE, folder, tokenizer.eod_token)


def write_template(folder: str | Path, template: str, end_ids: list[int]) -> None:
    """Give the model or tokenizer in ``folder`` a chat template (empty: it keeps its own), and add ``end_ids`` to the
    tokens that end an answer.

    ``smalti export``, ``chat`` and ``serve`` use them. An empty ``template`` leaves the folder's own.
    """
    if template:
        store.write_text(store.join(folder, TEMPLATE_FILE), template)
    path = store.join(folder, _GENERATION)
    generation = dict(store.read_json(path)) if store.exists(path) else {}
    before = generation.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    store.write_json(path, generation | {"eos_token_id": list(dict.fromkeys([*known, *end_ids]))})


def _filled(template: str, folder: str | Path, end: str) -> str:
    begin = template_variables(folder).get("bos_token", "")
    return template.replace("BEGIN", json.dumps(begin)).replace("END", json.dumps(end))
