"""Rules for the whole suite: no accidental skips, GPU tests where there is a GPU, quiet threads.

A test may be skipped only through the `gpu` marker or through `needs("ability")` (`support.abilities`), and
then says why. Any other skip (a missing package, a forgotten condition) fails the run: a check that silently
does not run is worse than none.
"""

from __future__ import annotations

import pytest

from support.abilities import missing

_MAY_SKIP = ("gpu", "needs")
_accidental_skips: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot do; torch is asked for a GPU only if such a test was chosen."""
    for item in items:
        for marker in item.iter_markers("needs"):
            for name in marker.args:
                if why := missing(name):
                    item.add_marker(pytest.mark.skip(reason=f"needs {name}: {why}"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no CUDA device on this machine"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and not set(_MAY_SKIP) & set(report.keywords):
        _accidental_skips.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _accidental_skips.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _accidental_skips:
        terminalreporter.section("skipped without the gpu or the needs marker: this fails the run", red=True)
        for nodeid in _accidental_skips:
            terminalreporter.line(nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _accidental_skips and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
