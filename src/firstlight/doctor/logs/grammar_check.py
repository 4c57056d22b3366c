"""Does an installed engine still print what its grammar expects? Its source is searched for each literal.

Reads files only and imports nothing of the engine. Invariant: a literal that the source puts together from
neighbouring strings is found too; whatever is not found is reported, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from firstlight.base.errors import UsageError
from firstlight.doctor.logs.grammar import Grammar, covers

# "a " f"b" in two lines, or in one, is one string.
_SEAM = re.compile(r"([\"'])\s*\\?\s*[rRfFbBuU]{0,2}([\"'])")
_PLACEHOLDER = re.compile(r"\{[^{}\n]*\}")


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `is_covered`: the version lies in the grammar's range."""

    engine: str
    folder: str
    version: str | None
    is_covered: bool
    num_files: int
    found: tuple[str, ...]
    missing: tuple[str, ...]


def check_package(grammar: Grammar, folder: Path) -> Drift:
    """Search the sources in `folder`, the package's own. Raises `UsageError` when there are none."""
    version = version_of(grammar, folder)
    wanted = set(grammar.literals(version))
    found: set[str] = set()
    num_files = 0
    for text in _sources(folder):
        num_files += 1
        found |= _found_in(text, wanted - found)
    if not num_files:
        raise UsageError(
            f"there is no Python source in {folder}.",
            f"Name the folder of the {grammar.package} package, such as …/site-packages/{grammar.package}.",
        )
    literals = grammar.literals(version)
    return Drift(
        engine=grammar.engine,
        folder=str(folder),
        version=version,
        is_covered=version is not None and covers(grammar.versions, version),
        num_files=num_files,
        found=tuple(literal for literal in literals if literal in found),
        missing=tuple(literal for literal in literals if literal not in found),
    )


def version_of(grammar: Grammar, folder: Path) -> str | None:
    """The version beside a package's folder, from its metadata."""
    for name in grammar.distributions:
        pattern = f"{name.replace('-', '_')}-*.dist-info"
        for path in sorted(folder.parent.glob(pattern)):
            return path.name.removesuffix(".dist-info").rpartition("-")[2].partition("+")[0]
    return None


def _sources(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue


def _found_in(text: str, wanted: set[str]) -> set[str]:
    """First as it stands, which is quick; then with its strings joined, as long ones are broken."""
    found = {literal for literal in wanted if literal in text}
    left = {literal for literal in wanted - found if literal.split()[0] in text}
    if not left:
        return found
    joined = _SEAM.sub("", text)
    plain = _PLACEHOLDER.sub("", joined)
    return found | {literal for literal in left if literal in joined or literal in plain}
