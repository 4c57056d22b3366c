"""`open_checkpoint`: one door to every checkpoint, whatever its kind.

Only headers are read. Invariant: what comes back can be loaded as far as headers can tell; every bad input is
one clear error.
"""

from __future__ import annotations

import os
from pathlib import Path

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.fields import lfs_pointer
from firstlight.facts.checkpoint.remedies import GIVE_MODEL
from firstlight.facts.checkpoint.tensor_facts import Checkpoint, TensorFacts
from firstlight.facts.gguf.gguf_checkpoint import open_gguf
from firstlight.facts.gguf.gguf_header import MAGIC
from firstlight.facts.hf.hf_checkpoint import PICKLE_SUFFIXES, open_hf, pickle_refused

__all__ = ["Checkpoint", "TensorFacts", "open_checkpoint"]

_ZIP, _PICKLE_PROTOCOLS = b"PK\x03\x04", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face folder.

    Raises `ModelFileError` (missing, truncated, damaged, not a model, a pickle) or `UnsupportedError` (a
    valid model that this version cannot run: architecture, weight format, rope scaling).
    """
    path = Path(path)
    try:
        if path.is_dir():
            return open_hf(path)
        return _open_file(path)
    except PermissionError as error:
        raise ModelFileError(
            f"{error.filename or path} cannot be read: permission denied.", "Check the file's permissions."
        ) from error


def _open_file(path: Path) -> Checkpoint:
    if not path.exists():
        raise ModelFileError(
            f"{path} does not exist.", "Check the path; a GGUF file, or a Hugging Face folder, is expected."
        )
    if not path.is_file():
        raise ModelFileError(f"{path} is neither a file nor a folder.", GIVE_MODEL)
    with path.open("rb") as file:
        head = os.pread(file.fileno(), 16, 0)
    if head.startswith(MAGIC):
        return open_gguf(path)
    if not head:
        raise ModelFileError(f"{path} is empty.", "Download the file again.")
    if path.suffix in PICKLE_SUFFIXES or head.startswith((_ZIP, *_PICKLE_PROTOCOLS)):
        raise pickle_refused(path)
    if head.startswith(b"version https://"[:16]):
        raise lfs_pointer(path)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        raise ModelFileError(
            f"{path} is one safetensors file; a model needs its config.json and tokenizer.json too.",
            f"Give the folder that holds it: {path.parent}",
        )
    raise ModelFileError(
        f"{path} is not a model: it is neither GGUF nor a Hugging Face folder.",
        GIVE_MODEL,
    )
