"""The parent of a command passes on output, exit code and signals, and leaves who waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys

DEADLINE_S = 60.0


def guarded(body: str) -> subprocess.Popen[str]:
    """`body` as the command of a guard."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from firstlight.cli.mount_guard import run_guarded\n"
        f"def run():\n    {body}\n"
        "run_guarded('run', run)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_output_and_exit_code_are_the_commands() -> None:
    process = guarded("print('x' * 300000); print('e', file=sys.stderr); sys.exit(7)")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (len(out), err, process.returncode) == (300001, "e\n", 7)


def test_a_signal_reaches_the_command() -> None:
    process = guarded("signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 9


def test_a_command_that_a_signal_ended_ends_us_alike() -> None:
    process = guarded("os.kill(os.getpid(), signal.SIGSEGV)")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGSEGV


def test_what_does_not_leave_after_its_last_word_is_left() -> None:
    process = guarded("threading.Thread(target=time.sleep, args=(600,)).start(); print('done'); sys.exit(3)")
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (out, process.returncode) == ("done\n", 3)


def test_the_reader_of_the_output_may_leave() -> None:
    process = guarded("[print('x' * 10_000, flush=True) for _ in range(1000)]")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.read()
    process.stderr.close()
    assert process.wait(DEADLINE_S) != 0
