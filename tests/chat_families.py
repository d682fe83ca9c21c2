# ruff: noqa: RUF001 (the control tokens of DeepSeek have such characters)
"""Chat templates of ten families, written anew, with the strings that the families publish for a conversation.

``Family.segments`` writes a conversation without jinja, as (text, in the loss) parts: the reference of masks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Segments = list[tuple[str, bool]]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family: its template, control tokens and the reference."""

    template: str
    controls: tuple[str, ...]
    bos: str
    eos: str
    segments: Callable[[Messages], Segments]
    published: str
    """The string of CONVERSATION, without its last answer, with the prompt for it."""
    is_byte_level: bool = True
    strips: bool = False
    """Whether the special tokens take the blanks that follow them."""
    has_system: bool = True


CONVERSATION: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "knock knock"},
    {"role": "assistant", "content": "who is there"},
    {"role": "user", "content": "Gemma"},
    {"role": "assistant", "content": "Gemma who?"},
]


def _with_headers(
    header: Callable[[str], str],
    end: str,
    *,
    begin: str = "",
    after: str = "\n",
    change: Callable[[str], str] = str,
    default: str = "",
) -> Callable[[Messages], Segments]:
    """Segments of a template that writes header, content and end for each message."""

    def segments(messages: Messages) -> Segments:
        parts = [(begin, False)]
        if default and messages[0]["role"] != "system":
            parts.append((header("system") + default + end + after, False))
        for message in messages:
            content = change(message["content"])
            parts += [(header(message["role"]), False), (content + end, message["role"] == "assistant")]
            parts.append((after, False))
        return parts

    return segments


def _im(role: str) -> str:
    return f"<|im_start|>{role}\n"


def _llama_2(messages: Messages) -> Segments:
    system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n" if messages[0]["role"] == "system" else ""
    parts: Segments = []
    for message in messages[1:] if system else messages:
        if message["role"] == "user":
            parts.append((f"<s>[INST] {(system + message['content']).strip()} [/INST]", False))
            system = ""
        else:
            parts.append((f" {message['content'].strip()} </s>", True))
    return parts


def _mistral(messages: Messages) -> Segments:
    parts: Segments = [("<s>", False)]
    for message in messages:
        is_user = message["role"] == "user"
        parts.append(
            (f"[INST] {message['content']} [/INST]", False) if is_user else (f"{message['content']}</s>", True)
        )
        if not is_user:
            parts.append((" ", False))
    return parts


def _deepseek(messages: Messages) -> Segments:
    parts: Segments = [("<｜begin▁of▁sentence｜>", False)]
    for message in messages:
        if message["role"] == "system":
            parts.append((message["content"], False))
        elif message["role"] == "user":
            parts.append((f"<｜User｜>{message['content']}<｜Assistant｜>", False))
        else:
            parts.append((f"{message['content']}<｜end▁of▁sentence｜>", True))
    return parts


def _dbrx(messages: Messages) -> Segments:
    parts: Segments = []
    for number, message in enumerate(messages):
        parts.append((("\n" if number else "") + _im(message["role"]), False))
        parts.append((message["content"].strip() + "<|im_end|>", message["role"] == "assistant"))
    return parts


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_QWEN_SYSTEM = "You are a helpful assistant."

FAMILIES = {
    "chatml": Family(
        _CHATML,
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
        _with_headers(_im, "<|im_end|>"),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nknock knock<|im_end|>\n<|im_start|>assistant\n"
        "who is there<|im_end|>\n<|im_start|>user\nGemma<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-2": Family(
        """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' %}
    {%- elif message.role == 'user' %}
        {{- bos_token + '[INST] ' + (ns.system + message.content).strip() + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}""",
        (),
        "<s>",
        "</s>",
        _llama_2,
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nknock knock [/INST] who is there </s><s>[INST] Gemma [/INST]",
        is_byte_level=False,
    ),
    "llama-3": Family(
        """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        _with_headers(
            lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n",
            "<|eot_id|>",
            begin="<|begin_of_text|>",
            after="",
            change=str.strip,
        ),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nknock knock<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nwho is there"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGemma<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n",
    ),
    "mistral": Family(
        """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '[INST] ' + message.content + ' [/INST]' if message.role == 'user' else message.content + eos_token + ' ' }}
{%- endfor %}""",
        (),
        "<s>",
        "</s>",
        _mistral,
        "<s>[INST] knock knock [/INST]who is there</s> [INST] Gemma [/INST]",
        is_byte_level=False,
        has_system=False,
    ),
    "gemma": Family(
        """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
        ("<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        _with_headers(
            lambda role: f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
            "<end_of_turn>",
            begin="<bos>",
            change=str.strip,
        ),
        "<bos><start_of_turn>user\nknock knock<end_of_turn>\n<start_of_turn>model\nwho is there<end_of_turn>\n"
        "<start_of_turn>user\nGemma<end_of_turn>\n<start_of_turn>model\n",
        is_byte_level=False,
        has_system=False,
    ),
    "qwen": Family(
        """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
"""
        + _CHATML,
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|im_end|>",
        _with_headers(_im, "<|im_end|>", default=_QWEN_SYSTEM),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nknock knock<|im_end|>\n<|im_start|>assistant\n"
        "who is there<|im_end|>\n<|im_start|>user\nGemma<|im_end|>\n<|im_start|>assistant\n",
    ),
    "deepseek": Family(
        """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- else %}{{- '<｜Assistant｜>' + message.content + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}""",
        ("<｜User｜>", "<｜Assistant｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        _deepseek,
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>knock knock<｜Assistant｜>who is there<｜end▁of▁sentence｜>"
        "<｜User｜>Gemma<｜Assistant｜>",
    ),
    "phi": Family(
        """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}""",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<s>",
        "<|endoftext|>",
        _with_headers(lambda role: f"<|{role}|>\n", "<|end|>"),
        "<|system|>\nBe brief.<|end|>\n<|user|>\nknock knock<|end|>\n<|assistant|>\nwho is there<|end|>\n<|user|>\n"
        "Gemma<|end|>\n<|assistant|>\n",
        is_byte_level=False,
        strips=True,
    ),
    "zephyr": Family(
        """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}""",
        (),
        "<s>",
        "</s>",
        _with_headers(lambda role: f"<|{role}|>\n", "</s>"),
        "<|system|>\nBe brief.</s>\n<|user|>\nknock knock</s>\n<|assistant|>\nwho is there</s>\n<|user|>\nGemma</s>\n"
        "<|assistant|>\n",
        is_byte_level=False,
    ),
    "dbrx": Family(
        """\
{%- for message in messages %}
    {{- ('' if loop.first else '\\n') + '<|im_start|>' + message.role + '\\n' }}
    {{- message.content.strip() + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n<|im_start|>assistant\\n' }}{%- endif %}""",
        ("<|im_start|>", "<|im_end|>"),
        "",
        "<|endoftext|>",
        _dbrx,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nknock knock<|im_end|>\n<|im_start|>assistant\n"
        "who is there<|im_end|>\n<|im_start|>user\nGemma<|im_end|>\n<|im_start|>assistant\n",
    ),
}


def write_folder(family: Family, folder: Path) -> Path:
    """Write a tokenizer of the family's kind, with its template, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(name for name in (family.bos, family.eos) if name)
    inner = byte_level(family.controls + names) if family.is_byte_level else metaspace(family, names)
    folder.joinpath("tokenizer.json").write_text(inner.to_str())
    named = {"bos_token": family.bos or None, "eos_token": family.eos, "pad_token": family.eos}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(config | named))
    folder.joinpath("chat_template.jinja").write_text(family.template)
    return folder


def byte_level(controls: tuple[str, ...]) -> Any:
    """A byte-level BPE that joins line ends and blanks with each other, with GPT-2's offsets."""
    from tokenizers import processors

    from smalti.data.tokenizer.train import train_bpe

    text = "\n\n who is there\n\n  knock knock\n\n\n Be brief.\n\nGemma who?\n" * 50
    inner = train_bpe([text], 320)
    inner.add_special_tokens(list(dict.fromkeys(controls)))
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    return inner


def metaspace(family: Family, names: tuple[str, ...]) -> Any:
    """A BPE with byte fallback like those of Llama 2 (a blank before every text) and Gemma (without)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    is_gemma = "<start_of_turn>" in family.controls
    merges = [("▁", letter) for letter in "abgijkowG"] + [("w", "h"), ("▁", "▁")]
    merges += [("\n", "\n")] if is_gemma else []
    characters = [chr(code) for code in range(33, 127)] + ["▁"] + (["\n"] if is_gemma else [])
    words = ["<unk>", *names, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *("".join(m) for m in merges)]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prefix = [] if is_gemma else [normalizers.Prepend("▁")]
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    inner.add_special_tokens([AddedToken(c, normalized=False, rstrip=family.strips) for c in family.controls])
    return inner
