"""Every error a user can cause, with the remedy and how it leaves the process.

FirstlightError
├── UsageError            exit 2   a flag, a config file or an environment variable is wrong
├── ModelFileError        exit 3   a file is missing, truncated, not a model, or refused
├── UnsupportedError      exit 4   a valid model or option that this version cannot run
├── ResourceError         exit 5   memory, port, processor or file limits do not suffice
├── EngineError           exit 6   the engine failed while it ran (a rank died, a collective timed out)
└── RequestError          HTTP 4xx a client's request cannot be answered as it stands

Raised everywhere; caught only at the top of a process (cli, rank, api), where it becomes one clear
message and an exit code, or an OpenAI-shaped error. Invariant: `str(error)` names the thing and the
reason and ends like a sentence, `error.hint` names the remedy.
"""

from __future__ import annotations

import re

_ENDS = (".", "!", "?", "…")
_DOUBLED_END = re.compile(r"(?<!\.)([.!?…])\.$")  # but not the last of three


class FirstlightError(Exception):
    """An error with a remedy. `hint` is one sentence in the imperative; only a `RequestError` says its
    remedy in the message.

    Whatever the message was put together from, it ends with one full stop.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(as_sentence(message))
        self.hint = hint

    def explain(self) -> str:
        """The message and the remedy as they are shown to a person."""
        return f"{self}\n  what to do: {self.hint}" if self.hint else str(self)


def as_sentence(text: str) -> str:
    """`text` with one full stop at its end, whether the reason that ends it brought none, or its own."""
    text = _DOUBLED_END.sub(r"\1", text.rstrip())
    return text if text.endswith(_ENDS) or not text else f"{text}."


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, as the end of a sentence that has named the file."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return error.strerror or str(error)


class UsageError(FirstlightError):
    exit_code = 2


class ModelFileError(FirstlightError):
    exit_code = 3


class UnsupportedError(FirstlightError):
    exit_code = 4


class ResourceError(FirstlightError):
    exit_code = 5


class EngineError(FirstlightError):
    exit_code = 6


class RequestError(FirstlightError):
    """A request that cannot be answered: HTTP `status`, OpenAI `type`, `code` and `param`."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: bytes that were none, and halves of JSON's pairs, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
