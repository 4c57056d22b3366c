"""Files that appear whole or not at all: written beside their place, flushed to the disk, then renamed.

Called wherever a kill in the middle of a write must lose nothing that was finished. Invariant: under the
final name there is never half a file.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from firstlight.base.errors import ResourceError

_KEY_DIGITS, _SHA256_DIGITS = 32, 64


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends without an error.

    Raises `ResourceError` where it cannot be written; what was under `path` before is then still there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what_to_do = "Make room there, or choose" if is_full else "Choose"
        raise ResourceError(
            f"{path} cannot be written: {error.strerror or error}.",
            f"{what_to_do} a folder that can be written to, then run the same command again: it goes on from "
            "what was finished.",
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def known_sha256(path: Path, memory: Path) -> str:
    """The same, remembered in the folder `memory` by the file's place, size and times; OSError as it comes.

    A second look at a file that nobody has changed reads nothing of it. Where `memory` cannot be written,
    nothing is remembered.
    """
    facts = path.stat()
    times = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_dev, facts.st_ino)
    key = hashlib.sha256(f"{path.resolve()} {times}".encode()).hexdigest()
    kept = memory / key[:_KEY_DIGITS]
    with suppress(OSError, UnicodeDecodeError):
        said = kept.read_text(encoding="ascii").split()
        if len(said) == 2 and said[0] == key and len(said[1]) == _SHA256_DIGITS:
            return said[1]
    digest = sha256_of(path)
    with suppress(ResourceError), replacing(kept) as file:
        file.write(f"{key} {digest}\n".encode())
    return digest


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
