"""Last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base import failure
from firstlight.base.errors import ResourceError
from firstlight.base.failure import Failure, explained, read_failure, write_failure


def test_an_error_with_a_remedy_arrives_whole(tmp_path: Path) -> None:
    write_failure(tmp_path, "rank-0", ResourceError("too little memory", "lower --kv-memory"))
    assert read_failure(tmp_path, "rank-0") == Failure("too little memory.", "lower --kv-memory", 5)
    assert read_failure(tmp_path, "rank-1") is None


def test_any_other_error_is_called_a_bug(tmp_path: Path) -> None:
    write_failure(tmp_path, "api", KeyError("x"))
    failure = read_failure(tmp_path, "api")
    assert failure is not None
    assert (failure.message, failure.exit_code) == ("KeyError: 'x'", 1)
    assert "--debug" in failure.hint


def test_rubbish_is_no_last_words(tmp_path: Path) -> None:
    (tmp_path / "failure-api.json").write_text("{")
    assert read_failure(tmp_path, "api") is None


def test_a_limited_address_space_is_said_where_memory_or_threads_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = RuntimeError("can't start new thread")
    assert explained(short)[0] == "RuntimeError: can't start new thread"
    monkeypatch.setattr(failure.resource, "getrlimit", lambda number: (900 << 20, -1))
    message, hint = explained(short)
    assert message.endswith("(the address space is limited to 900 MiB: Cannot allocate memory)")
    assert "ulimit -v" in hint
    assert explained(ValueError("broken"))[0] == "ValueError: broken"
