"""What must never stand in evidence: values that give access to something.

Invariant: a value is left out by the *name* it is given to, so that a secret need not be recognised by its
looks; what looks like one is left out too. What was redacted once is not changed by a second time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "[hidden]"
_NAME = re.compile(
    r"(?i)(^|[-_.])(api[-_]?keys?|keys?|token|secret|password|passwd|passphrase|credentials?|cookie|auth"
    r"|authorization|pwd|pat|access[-_]?key[-_]?id)s?$"
)
# In free text a name is followed by = or :, and "key: rank-0" is no secret there.
_ASSIGNED = re.compile(
    r"(?i)(?<![a-z0-9])((?:[a-z0-9]+[-_.])*(?:(?:api|access|secret|private|auth|signing|encryption|account|ssh)"
    r"[-_]?keys?(?:[-_]id)?|[a-z]*tokens?|(?:client)?secrets?|passwords?|passwd|passphrase|pwd|credentials?"
    r"|(?:set-)?cookie|(?:proxy-)?authorization|signature|sig))"
    r"((?:\\?[\"'])?+\s*+(?>=>|[=:])\s*+(?:(?!\[hidden\])[\[({])*+\s*+(?:b?\\?[\"'])?+)(?!\[hidden\])"
    r"((?<=[\"'])[^\"'\\]+|[^\s\"'\\,;&)\]}]+)"
)
_PROSE = re.compile(r"(?i)\b((?:password|passphrase|secret|api[- ]?key)\s+(?:is|was)\s+)(?!\[hidden\])(\S+)")
_LOGIN = re.compile(r"((?:^|\s)(?:-u|--user|--proxy-user)[ =]+[^\s:]+:)(?!\[hidden\])(\S+)")
_COOKIE = re.compile(r"(?i)\b((?:set-)?cookie[\"']?\s*+[:=]\s*+)(?!\[hidden\]$).+")
_LIST = re.compile(  # the further values of a list of keys
    r"(?i)((?:api[-_]?keys?|tokens|secrets|passwords)[\"']?\s*[=:]\s*[\[(])([^\])]*)"
)
_OPTION = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)([= ]+)(?!-|\[hidden\])([^\s\"',;]+)")
_ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@\"'<>]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic|digest|negotiate)\s+[a-z0-9._~+/=-]{8,}")
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}"
    r"|nvapi-[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{30,}|p[y]pi-[A-Za-z0-9_-]{20,}|r8_[A-Za-z0-9]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
# The lines of a private key: its head, and the body of sixty-four letters that stand alone in a line.
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL
)
_KEY_LINE = re.compile(r"(?m)^[A-Za-z0-9+/]{60,76}={0,2}$")
# `--max-tokens 8` and MAX_TOKENS count something; only a single "token" is a secret.
_HARMLESS = re.compile(
    r"(?i)(max|min|num|batched|total|stop|prompt|new|completion|input|output|generated|cached|draft|per)[-_]"
    r"([a-z]+[-_])*tokens?$|tokenizer|ssl[-_]?key|tls[-_]?key|(key|token|secret|password)s?[-_]?(file|path)$"
    r"|(eos|bos|pad|unk|sep|cls|mask|image|audio|video|special|added|first|next|last|begin|end|one|a|the|each)"
    r"[-_]tokens?$|^tokens$"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return bool(_NAME.search(name.strip("-"))) and not _HARMLESS.search(name)


def hide_in_text(text: str) -> str:
    """Free text without what looks like a secret: log lines, addresses, stack excerpts."""
    text = _KEY_LINE.sub(HIDDEN, _KEY_BLOCK.sub(HIDDEN, text))
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _LOOKS.sub(HIDDEN, text)
    text = _COOKIE.sub(rf"\1{HIDDEN}", text)
    text = _LOGIN.sub(rf"\1{HIDDEN}", _PROSE.sub(rf"\1{HIDDEN}", text))
    text = _LIST.sub(_hide_list, text)
    text = _ASSIGNED.sub(_hide_assigned, text)
    return _OPTION.sub(_hide_option, text)


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


def _hide_list(match: re.Match[str]) -> str:
    if (
        match[2].lstrip("[").startswith(HIDDEN[1:-1])
        or _HARMLESS.search(re.split(r"[\"'\s=:]", match[1])[0])
        or not re.search(r"[A-Za-z]", match[2])
    ):
        return match[0]
    return f"{match[1]}{HIDDEN}"


def _hide_assigned(match: re.Match[str]) -> str:
    """Numbers and what says that there is no value stay: `token: 5`, `api_key=None`."""
    is_plain = re.fullmatch(r"None|null|true|false|True|False", match[3])
    is_number = match[1].lower().endswith(("token", "tokens")) and re.fullmatch(r"-?\d{1,9}", match[3])
    if is_plain or is_number or _HARMLESS.search(match[1]):
        return match[0]
    return f"{match[1]}{match[2]}{HIDDEN}"


def _hide_option(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{HIDDEN}" if is_secret_name(match[1]) else match[0]
