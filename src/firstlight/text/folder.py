"""The tokenizer files of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

Called by `text.model`. Invariant: what a file says wrongly is an error that names the file, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.fields import read_json_object

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_TEMPLATE_BYTES = 1024 * 1024
_TEMPLATE_REMEDY = "Give the path of a Jinja file in UTF-8 with --chat-template FILE."


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the folder. Only tokenizer.json is read: it holds everything in one known form."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).exists()
        ]
        if others:
            raise UnsupportedError(
                f"{folder} has no tokenizer.json, only {', '.join(others)}.",
                "Load and save the tokenizer once with transformers (AutoTokenizer, use_fast=True); that "
                "writes tokenizer.json.",
            )
        raise ModelFileError(f"{folder} has no tokenizer.json.", "Download the tokenizer files too.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the bindings raise plain Exception for any fault of the file
        raise ModelFileError(
            f"{path} is not a valid tokenizer: {error}",
            "Download the file again; it may be incomplete.",
        ) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """tokenizer_config.json, or nothing where the folder has none."""
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.is_file() else {}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens by role, as templates use them."""
    texts = {role: config.get(role) for role in SPECIAL_ROLES}
    plain = {role: text.get("content") if isinstance(text, Mapping) else text for role, text in texts.items()}
    return {role: text for role, text in plain.items() if isinstance(text, str)}


def read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The default chat template and where it stands: chat_template.jinja, else the entry in the config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_template_file(path), str(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    where = f"{folder / 'tokenizer_config.json'} (chat_template)"
    return (template if isinstance(template, str) and template else None), where


def read_template_file(path: Path) -> str:
    """The text of a template file; a `ModelFileError` if it cannot be one."""
    try:
        size = path.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise ModelFileError(
                f"{path} is too large for a chat template: it has {size} bytes, and at most "
                f"{MAX_TEMPLATE_BYTES} are read.",
                _TEMPLATE_REMEDY,
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFileError(
            f"The chat template {path} cannot be read: {reason}", _TEMPLATE_REMEDY
        ) from error
    except UnicodeDecodeError as error:
        raise ModelFileError(
            f"The chat template {path} cannot be read: byte {error.start} is not UTF-8.", _TEMPLATE_REMEDY
        ) from error
