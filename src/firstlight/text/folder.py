"""The tokenizer files of a Hugging Face folder: tokenizer.json or Kimi's, tokenizer_config.json, templates.

Invariant: what a file says wrongly is an error that names the file, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.fields import read_json_object
from firstlight.text.kimi import RANKS_FILE, is_kimi, knows_split, read_kimi, tokenizer_code
from firstlight.text.remote_code import run_tokenizer_code

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_OTHER_FILES = ("tokenizer.model", "tekken.json", "vocab.json", RANKS_FILE)
MAX_TEMPLATE_BYTES = 1024 * 1024
_TEMPLATE_REMEDY = "Give the path of a Jinja file in UTF-8 with --chat-template FILE."


def read_tokenizer(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of the folder: tokenizer.json, which holds everything in one known form, or Kimi's files.

    `trust_remote_code`: where there is neither, the folder's own code is run.
    """
    if config.get("split_special_tokens") is True:
        raise UnsupportedError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens = true is not supported.",
            "Set it to false: with it, no template can write a special token.",
        )
    path = folder / "tokenizer.json"
    if path.is_file():
        return _read_json(path)
    code = tokenizer_code(config)
    is_known = is_kimi(folder, config)
    if is_known and (knows_split(folder, config) or not trust_remote_code):
        return read_kimi(folder, config)
    if code is not None:
        if trust_remote_code:
            return run_tokenizer_code(folder)
        raise UnsupportedError(
            f"{folder} has no tokenizer.json, and its tokenizer_config.json wants {code} of the folder's own "
            "code, which is not run: it can do whatever you can.",
            "If you trust that code, start with --trust-remote-code; or use a copy of the model that has a "
            "tokenizer.json.",
        )
    raise _no_tokenizer(folder)


def _no_tokenizer(folder: Path) -> FirstlightError:
    others = [name for name in _OTHER_FILES if (folder / name).exists()]
    if not others:
        return ModelFileError(f"{folder} has no tokenizer.json.", "Download the tokenizer files too.")
    return UnsupportedError(
        f"{folder} has no tokenizer.json, only {', '.join(others)}.",
        "Load and save the tokenizer once with transformers (AutoTokenizer, use_fast=True); that writes "
        "tokenizer.json.",
    )


def _read_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
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
