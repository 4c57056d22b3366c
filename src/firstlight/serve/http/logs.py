"""The api process's log on standard error, as text or one JSON object a line.

Invariant: prompts and answers are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time


class TextFormatter(logging.Formatter):
    """One line a record; what a client sent cannot end a line or move the reader's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Called by `format`; the traceback, which is ours, comes after it."""
        line = super().formatMessage(record)
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
        )


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(log_format: str) -> None:
    """Sends every log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # serve.access says it better
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
