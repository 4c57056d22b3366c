"""What a person reads of an error."""

from __future__ import annotations

import pytest

from firstlight.base.errors import FirstlightError, UsageError, as_sentence, why_unreadable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is missing", "it is missing."),
        ("it is missing.", "it is missing."),
        ("not TOML: expected a key..", "not TOML: expected a key."),
        ("is it there?.", "is it there?"),
        ("and so on...", "and so on..."),
        ("cut off…", "cut off…"),
        ("two lines of a log\n", "two lines of a log."),
        ("", ""),
    ],
)
def test_one_full_stop_at_the_end(text: str, expected: str) -> None:
    assert as_sentence(text) == expected
    assert str(FirstlightError(text)) == expected


def test_a_reason_with_a_full_stop_of_its_own_gets_no_second_one() -> None:
    error = UsageError(f"the file cannot be used: {ValueError('it is empty.')}.", "Give another one.")
    assert error.explain() == "the file cannot be used: it is empty.\n  what to do: Give another one."


def test_why_a_file_cannot_be_read_is_said_without_numbers_of_the_system() -> None:
    assert (
        why_unreadable(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    )
    assert why_unreadable(UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "bad")) == "byte 2 is not UTF-8"
    assert why_unreadable(OSError("the disk is gone")) == "the disk is gone"
