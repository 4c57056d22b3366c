"""Output of a child: lines whatever ends them, a log, and a child that never waits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.launch.processes.output import ChildOutput, LineCutter, OutputLine


def texts(lines: list[OutputLine]) -> list[str]:
    return [line.text for line in lines]


@given(st.lists(st.text("ab\r\n", max_size=6)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(pieces: list[str]) -> None:
    whole, parts = LineCutter(), LineCutter()
    text = "".join(pieces)
    at_once = texts(whole.feed(text.encode(), 0.0)) + texts(whole.finish(0.0))
    in_parts = [line for piece in pieces for line in texts(parts.feed(piece.encode(), 0.0))]
    in_parts += texts(parts.finish(0.0))
    assert in_parts == at_once == [line for line in text.replace("\r", "\n").split("\n") if line]


def test_a_progress_bar_is_lines() -> None:
    bar = b"loading:  10%\rloading:  20%\rloading: 100%\nnext"
    assert texts(LineCutter().feed(bar, 0.0)) == ["loading:  10%", "loading:  20%", "loading: 100%"]


def test_what_stands_for_a_second_is_handed_on() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"waiting for", 0.0) == []
    assert cutter.take_partial(0.5) == []
    assert cutter.take_partial(1.1) == [OutputLine(1.1, "waiting for", is_partial=True)]
    assert texts(cutter.feed(b" rank 3\n", 2.0)) == [" rank 3"]


def test_a_line_without_end_is_cut() -> None:
    lines = LineCutter().feed(b"x" * 200_000, 0.0)
    assert [len(line.text) for line in lines] == [65536, 65536, 65536]


def test_a_real_pipe_is_drained_to_lines_and_log(tmp_path: Path) -> None:
    lines: list[OutputLine] = []
    read_fd, write_fd = os.pipe()
    output = ChildOutput(read_fd, tmp_path / "rank-0.log", lines.append)
    os.write(write_fd, b"one\ntwo ")
    deadline_s = time.monotonic() + 5
    while len(lines) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.close(write_fd)
    output.join(5)
    os.close(read_fd)
    assert texts(lines) == ["one", "two "]
    assert lines[1].is_partial
    assert output.last_lines == ("one", "two ")
    assert (tmp_path / "rank-0.log").read_bytes() == b"one\ntwo "


def test_a_full_disk_does_not_stop_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    lines: list[OutputLine] = []
    output = ChildOutput(read_fd, Path("/dev/full"), lines.append)
    for _ in range(50):
        os.write(write_fd, b"x" * 4000 + b"\n")
    os.close(write_fd)
    output.join(5)
    os.close(read_fd)
    assert len(lines) == 50


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.launch.processes.output._MAX_LOG_BYTES", 1000)
    read_fd, write_fd = os.pipe()
    output = ChildOutput(read_fd, tmp_path / "api.log", lambda line: None)
    for number in range(30):
        os.write(write_fd, b"x" * 99 + b"\n")
        deadline_s = time.monotonic() + 5
        while len(output.last_lines) <= number and time.monotonic() < deadline_s:
            time.sleep(0.002)
    os.close(write_fd)
    output.join(5)
    os.close(read_fd)
    assert (tmp_path / "api.log").stat().st_size < 1200
    assert (tmp_path / "api.log.1").exists()
