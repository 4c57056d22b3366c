"""Where a foreign engine's ranks are by what its log says, one cursor for each rank.

Called by `view`. Pure. Invariant: ranks are compared only in a log that is there from its first line: in the
end of a long one, the lines of some ranks may merely have been cut off.
"""

from __future__ import annotations

from firstlight.doctor.evidence import Case, Seen
from firstlight.doctor.grammar import ENGINES, load_grammar
from firstlight.doctor.grammar_reader import GrammarReader
from firstlight.doctor.options import sizes
from firstlight.doctor.values_process import LogTail


def read_log(case: Case) -> tuple[GrammarReader, Seen[LogTail]] | None:
    """The reader after the longest whole log of the latest look; None for our own engine, or without one."""
    engine = case.target.engine
    logs = [seen for seen in case.all(LogTail) if _is_whole(seen.value)]
    if engine.value not in ENGINES or not logs:
        return None
    seen = max(logs, key=lambda one: (one.evidence.look, one.value.size_bytes))
    command = next((p.command for p in case.target.processes if len(p.command) > 1), ())
    reader = GrammarReader(load_grammar(engine.value), sizes(engine, command))
    reader.feed_all(seen.value.lines)
    return reader, seen


def _is_whole(log: LogTail) -> bool:
    """Line ends and empty lines are not kept, so a whole log has a little less than its size."""
    kept = sum(len(line.encode()) + 1 for line in log.lines)
    return bool(log.lines) and kept >= log.size_bytes * 0.8
