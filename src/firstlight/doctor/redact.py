"""What must never stand in evidence: values that give access to something.

Called by discovery (command lines), by the environment collector and by the bundle. Invariant: a value is
left out by the *name* it is given to, so that a secret need not be recognised by its looks; what looks like
one is left out too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "[hidden]"
_NAME = re.compile(
    r"(?i)(^|[-_.])(api[-_]?keys?|keys?|token|secret|password|passwd|passphrase|credentials?|cookie|auth)s?$"
)
_ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+(:[^/\s@]*)?@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}")
_LOOKS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
)
_ASSIGNED = re.compile(
    r"(?i)((?:api[-_]?key|token|secret|password|passwd)[\"']?\s*[=:]\s*[\"']?)(?!\[hidden\])[^\s\"',;&]{4,}"
)
# `--max-tokens 8` and MAX_TOKENS count something; only a single "token" is a secret.
_HARMLESS = re.compile(
    r"(?i)(max|num|min|batched|total|stop)[-_].*tokens?$|tokenizer|ssl[-_]?key|tls[-_]?key"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return bool(_NAME.search(name.strip("-"))) and not _HARMLESS.search(name)


def hide_in_text(text: str) -> str:
    """Free text without what looks like a secret: log lines, addresses, stack excerpts."""
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", _LOOKS.sub(HIDDEN, text))


def hide_in_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line without the values of secret options (`--api-key X`, `--api-key=X`)."""
    shown: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value and not argument.startswith("--"):
            shown.append(HIDDEN)
            continue
        is_secret = argument.startswith("-") and is_secret_name(name)
        shown.append(f"{name}={HIDDEN}" if is_secret and equals else hide_in_text(argument))
        is_value = is_secret and not equals
    return tuple(shown)
