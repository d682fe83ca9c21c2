"""Adapters for the engine: read from folders in PEFT's format, and checked against the base.

A folder may also hold the tokenizer of the training, as ``smalti export`` and PEFT's users write it. Its chat template
and end tokens are used for the adapter's requests; the base's tokenizer encodes them.
"""

from collections.abc import Mapping
from pathlib import Path

from smalti.base import log, store
from smalti.base.errors import UserError
from smalti.config.model import ModelConfig
from smalti.data.tokenizer.chat import ChatFormat, load_chat, template_variables
from smalti.data.tokenizer.encode import Tokenizer
from smalti.distributed.checkpoint.base import identity, require_same
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter
from smalti.model.huggingface_weights import check_generation
from smalti.serve.folders import ModelFolder, find_adapter
from smalti.track.registry.facts import RECORD


def parse(options: list[str], base_name: str) -> dict[str, str]:
    """Return name -> folder of options ``NAME=FOLDER``; names must differ from each other and from the base's.

    A folder may be a reference to the model registry, ``models:/NAME@TAG``.
    """
    named: dict[str, str] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals or not name or not folder:
            raise UserError(
                f"--adapter {option}", allowed="NAME=FOLDER", hint=f"--adapter {Path(option).name or 'mine'}={option}"
            )
        if name in named or name == base_name:
            raise UserError(f"--adapter {option}: '{name}' is already the name of a model", allowed="another name")
        named[name] = find_adapter(folder)
    return named


def load(folders: Mapping[str, str], base: str | Path, model: ModelConfig) -> dict[str, Adapter]:
    """Read the adapters by name. Raises DataError for one that does not fit, or was trained beside another base.

    The latter is known where a record of ``smalti export`` names the digest of a base folder.
    """
    adapters = {}
    base_identity: dict[str, str] | None = None
    for name, path in folders.items():
        folder = _folder(path)
        adapters[name] = peft.load(folder, model)
        check_generation(folder, model.vocab_size)
        record = store.read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
        recorded = record.get("base", {"kind": "unknown"})
        if recorded["kind"] == "folder":
            base_identity = base_identity or identity(base, str(base))
            require_same(recorded, base_identity, f"the adapters in {folder} were")
        else:
            log.get("serve").warning("it is not checked that %s was trained beside %s: no record says so", folder, base)
    return adapters


def load_chats(folders: Mapping[str, str], base: ChatFormat) -> dict[str, ChatFormat]:
    """Return the chat format of each adapter: its folder's template, or the base's format if that has none."""
    chats = {name: load_chat(_folder(path)) for name, path in folders.items()}
    return {name: chat if chat.source else base for name, chat in chats.items()}


def load_end_ids(folders: Mapping[str, str], tokenizer: Tokenizer) -> dict[str, frozenset[int]]:
    """Return the tokens that end an answer of each adapter, besides those of the base.

    They are those of ``generation_config.json``, which ``load`` checks, and the tokenizer's eos token.
    """
    end_ids = {}
    for name, path in folders.items():
        folder = _folder(path)
        eos_id = tokenizer.added_tokens.get(str(template_variables(folder).get("eos_token")))
        _, ids = ModelFolder(str(folder), None).special_ids()
        end_ids[name] = ids if eos_id is None else ids | {eos_id}
    return end_ids


def _folder(name: str) -> Path:
    """Return the folder of an adapter, which may be given by its run."""
    path = Path(name)
    return path if peft.is_adapter_folder(path) or not peft.is_adapter_folder(path / "adapter") else path / "adapter"
