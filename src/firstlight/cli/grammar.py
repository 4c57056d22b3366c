"""`firstlight grammar`: whether an installed engine still prints what we know of its log.

Invariant: nothing of the engine is imported or run; its files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.doctor.logs.grammar_check import Drift

DRIFTED = 1


@dataclass
class GrammarOptions:
    """What `grammar` takes."""

    engine: Annotated[str, typer.Argument(help="vllm or sglang.", metavar="ENGINE")]
    package: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the engine's package. Without it: the one that `serve --backend` would start.",
            metavar="DIR",
        ),
    ] = None
    backend_python: Annotated[
        str | None, typer.Option(help="Python interpreter that has the engine.", metavar="PATH")
    ] = None
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    debug: Debug = False


def grammar(options: GrammarOptions) -> int:
    """Check that an installed vLLM or SGLang still prints the log lines that firstlight reads.

    The exit code is 1 when a line is gone: its phase would not be seen.

    Examples:
      firstlight grammar vllm
      firstlight grammar sglang --package site-packages/sglang
    """
    from firstlight.doctor.logs.grammar import load_grammar
    from firstlight.doctor.logs.grammar_check import check_package

    known = load_grammar(options.engine)
    folder = options.package or _installed(options.engine, options.backend_python)
    drift = check_package(known, folder)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(drift), indent=2).decode())
    else:
        print("\n".join(_as_text(drift, known.versions, known.checked)))
    return DRIFTED if drift.missing else 0


def _installed(engine: str, python: str | None) -> Path:
    from firstlight.launch.backends.installed import find_installed

    return Path(find_installed(engine, python).folder)


def _as_text(drift: Drift, versions: str, checked: str) -> list[str]:
    total = len(drift.found) + len(drift.missing)
    name = f"{drift.engine} {drift.version or 'of unknown version'}"
    lines = [f"{name} in {drift.folder}: {len(drift.found)} of {total} literals in {drift.num_files} files"]
    if not drift.is_covered:
        lines.append(f"  the grammar is for {versions}, last checked with {checked}")
    lines += [f"  not found: {literal!r}" for literal in drift.missing]
    return lines
