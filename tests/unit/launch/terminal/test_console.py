"""What a person reads, on a terminal and in a file."""

from __future__ import annotations

import io
import json
import re
import subprocess
import time

import msgspec
import pytest

from firstlight.base.config import EngineSection, ModelSection, RunConfig, ServerSection
from firstlight.launch.terminal.console import Console
from firstlight.launch.terminal.ready_card import base_url, ready_card
from firstlight.launch.timeline.progress import ProgressLine

STARTS: dict[tuple[str, int], float] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    STARTS.clear()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(
    time_s: float, phase: str, done: int = 0, total: int = 0, unit: str = "", rank: int = 0
) -> ProgressLine:
    """`time_s` is when the phase began if it is the first line of it in a test."""
    start_s = STARTS.setdefault((phase, rank), time_s)
    return ProgressLine(
        time_s=time_s,
        name=f"rank-{rank}",
        rank=rank,
        phase=phase,
        start_s=start_s,
        done=done,
        total=total,
        unit=unit,
    )


def run_config(**server: object) -> RunConfig:
    return RunConfig(
        run_dir="/run/x",
        model=ModelSection(path="m", served_names=("tiny",)),
        engine=EngineSection(threads=2),
        server=ServerSection(**server),  # type: ignore[arg-type]
    )


def test_a_file_gets_one_line_a_phase() -> None:
    out = io.StringIO()
    console = Console(out, 100.0, 1, has_keys=False)
    for progress in (
        line(100.5, "imports"),
        line(102.0, "weights", 0, 98_000_000, "bytes"),
        line(102.5, "weights", 49_000_000, 98_000_000, "bytes"),
        line(103.0, "weights", 98_000_000, 98_000_000, "bytes"),
        line(103.0, "ready"),
    ):
        console.progress(progress)
    assert out.getvalue().splitlines() == [
        "   2.0 s  imports",
        "   3.0 s  weights     98.0 MB of 98.0 MB  98.0 MB/s",
    ]


def test_a_short_phase_gets_a_line_if_it_has_something_to_say() -> None:
    """Of a foreign engine's log two lines may be read at once: the phase between them took no time."""
    out = io.StringIO()
    console = Console(out, 100.0, 1, has_keys=False)
    told = msgspec.structs.replace(line(101.0, "kv"), detail="78,208 tokens")
    for progress in (told, line(101.0, "compile"), line(101.0, "capture")):
        console.progress(progress)
    assert out.getvalue().splitlines() == ["   1.0 s  kv          78,208 tokens"]


def test_a_long_phase_is_mentioned_again_with_the_time_left() -> None:
    out = io.StringIO()
    console = Console(out, 0.0, 2, has_keys=False)
    console.progress(line(0.0, "weights", 0, 100, "layers", rank=1))
    console.progress(line(6.0, "weights", 25, 100, "layers", rank=1))
    assert out.getvalue() == "   6.0 s  rank 1  weights     25 of 100 layers  4.2 layers/s  18 s left\n"


def test_what_was_just_mentioned_is_not_said_again_at_the_end() -> None:
    out = io.StringIO()
    console = Console(out, 0.0, 1, has_keys=False)
    console.progress(line(0.0, "weights", 0, 100, "layers"))
    console.progress(line(6.0, "weights", 100, 100, "layers"))
    console.progress(line(6.1, "kv"))
    assert out.getvalue().count("weights") == 1
    console.progress(line(6.5, "ready"))
    assert out.getvalue().count("kv") == 1


def screen_of(written: str) -> list[str]:
    """What a terminal shows in the end: the lines that no later one erased."""
    rows: list[str] = [""]
    for piece in re.split(r"(\n|\r|\x1b\[[0-9?;]*[A-Za-z])", written):
        if piece == "\n":
            rows.append("")
        elif piece == "\x1b[2K":
            rows[-1] = ""
        elif piece == "\x1b[1A":
            rows.pop()
        elif not piece.startswith(("\x1b", "\r")):
            rows[-1] += piece
    return [row.rstrip() for row in rows if row.strip()]


def test_a_terminal_gets_a_row_for_each_rank_that_other_output_does_not_break() -> None:
    out = Terminal()
    console = Console(out, 0.0, 2, has_keys=False)
    console.progress(line(1.0, "weights", 25, 100, "layers"))
    console.progress(line(1.0, "imports", 500, 0, "modules", rank=1))
    console.say("a log line")
    time.sleep(0.15)  # the view is drawn ten times a second at most
    console.progress(line(2.0, "weights", 50, 100, "layers"))
    shown = screen_of(out.getvalue())
    assert shown[0] == "a log line"
    assert re.search(r"rank 0 +weights .+ 50 of 100 layers +50 layers/s +1 s left", shown[1])
    assert re.search(r"rank 1 +imports .+ 500 modules", shown[2])
    console.progress(line(3.0, "ready"))
    console.progress(line(3.0, "ready", rank=1))
    assert screen_of(out.getvalue())[0] == "a log line"
    assert "rank 1  weights" not in screen_of(out.getvalue())[-1]


def test_after_ready_the_ranks_are_no_longer_quoted() -> None:
    out = io.StringIO()
    console = Console(out, 0.0, 1, has_keys=False)
    console.progress(line(1.0, "ready"))
    console.progress(line(90.0, "drain", 1, 2, "requests"))
    assert out.getvalue() == ""


def test_the_printed_command_is_valid_shell_whatever_the_name() -> None:
    card = ready_card(run_config(), 4.2, has_keys=True, program="firstlight")
    assert "ready in 4.2 s: tiny at http://127.0.0.1:8000/v1" in card
    assert "$FIRSTLIGHT_API_KEY" in card
    command = "\n".join(row for row in card.splitlines() if row.startswith(("  curl", "    -")))
    shown = subprocess.run(
        ["bash", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}\n{command}"],
        capture_output=True,
        text=True,
        check=True,
        env={"FIRSTLIGHT_API_KEY": "secret"},
    ).stdout
    assert "Authorization: Bearer secret" in shown
    assert '"model": "tiny"' in shown


def test_urls() -> None:
    assert base_url(ServerSection(host="0.0.0.0", port=9)) == "http://127.0.0.1:9"
    assert base_url(ServerSection(host="::1", port=9)) == "http://[::1]:9"
    assert base_url(ServerSection(port=9, tls_cert="c", tls_key="k")) == "https://127.0.0.1:9"
    card = ready_card(run_config(uds="/run/a b.sock"), 1.0, has_keys=False, program="firstlight")
    assert "--unix-socket '/run/a b.sock' http://localhost/v1/chat/completions" in card


def test_json_lines_for_machines() -> None:
    out = Terminal()
    console = Console(out, 0.0, 1, has_keys=False, as_json=True)
    console.progress(line(1.0, "weights", 1, 10, "layers"))
    console.progress(line(2.0, "weights", 10, 10, "layers"))
    console.progress(line(2.0, "ready"))
    console.failed("broken")
    console.pass_on('{"message": "of a child"}')
    lines = [json.loads(row) for row in out.getvalue().splitlines()]
    assert [row["message"] for row in lines] == [
        "2.0 s  weights     10 of 10 layers  10 layers/s",
        "error: broken",
        "of a child",
    ]
    assert lines[0]["logger"] == "firstlight.launch"


def test_another_attempt_is_shown_from_its_beginning() -> None:
    out = Terminal()
    console = Console(out, 0.0, 1, has_keys=False, as_json=True)
    console.progress(line(1.0, "ready"))
    console.begin(100.0)
    STARTS.clear()
    console.progress(line(101.0, "weights", 1, 10, "layers"))
    console.progress(line(102.0, "weights", 10, 10, "layers"))
    console.progress(line(103.0, "ready"))
    (row,) = out.getvalue().splitlines()
    assert json.loads(row)["message"] == "3.0 s  weights     10 of 10 layers  10 layers/s"
