"""Log grammars: what recorded logs of real engines lead to, rank by rank, and what drift looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstlight.base.errors import UsageError
from firstlight.base.phases import PHASES
from firstlight.doctor.logs.grammar import ENGINES, Grammar, covers, load_grammar, parse_grammar
from firstlight.doctor.logs.grammar_check import check_package
from firstlight.doctor.logs.grammar_reader import GrammarReader, PhaseEvent
from firstlight.doctor.servers.options import Sizes
from firstlight.launch.processes.output import LineCutter

RECORDED = Path(__file__).parents[3] / "data" / "vllm"
BAR = "Loading safetensors checkpoint shards: {percent}% Completed | {done}/64 [00:22<00:00,  2.86it/s]"
AT = "[2026-11-29 21:05:10{labels}] "


def read_recorded(name: str, ranks: int) -> tuple[GrammarReader, list[PhaseEvent]]:
    """A recorded start, in the pieces in which it came through the pipe."""
    reader = GrammarReader(load_grammar("vllm"), Sizes(tensor=ranks, ranks_here=ranks))
    cutter, events = LineCutter(), []
    for row in (RECORDED / name).read_text().splitlines():
        time_s, text = json.loads(row)
        lines = cutter.feed(text.encode(), time_s)
        events += reader.feed_all(line.text for line in lines)
    return reader, events


def entered(events: list[PhaseEvent], rank: int | None) -> list[str]:
    return [event.phase for event in events if event.rank == rank and event.is_new]


def sglang(ranks: int = 8) -> GrammarReader:
    return GrammarReader(load_grammar("sglang"), Sizes(tensor=ranks, ranks_here=ranks))


def say(reader: GrammarReader, text: str, labels: str = "") -> list[PhaseEvent]:
    return reader.feed(AT.format(labels=f" {labels}" if labels else "") + text)


def test_a_recorded_start_of_vllm_with_one_rank() -> None:
    reader, events = read_recorded("start-1-rank.jsonl", 1)
    assert entered(events, 0) == [
        "imports", "rendezvous", "build", "weights", "prepare", "compile", "kv", "self-test"
    ]  # fmt: skip
    assert entered(events, None) == ["imports", "build", "self-test"]
    bars = [(event.done, event.total, event.unit) for event in events if event.total]
    assert bars == [(0, 1, "shards"), (1, 1, "shards")]
    assert reader.cursor(0).phase == "self-test"
    assert reader.root_cause() is None


def test_a_recorded_start_of_vllm_with_three_ranks() -> None:
    reader, events = read_recorded("start-3-ranks.jsonl", 3)
    assert reader.milestones == {"rendezvous": {0, 1, 2}, "build": {0, 1, 2}}
    assert sorted(reader.pids) == [0, 1, 2]
    assert len(set(reader.pids.values())) == 3
    for rank in (1, 2):
        assert entered(events, rank)[:5] == ["imports", "rendezvous", "build", "weights", "prepare"]
        # The bar is rank 0's: the others are in the phase, and nothing says how far.
        assert not [event for event in events if event.rank == rank and event.total]


def test_the_cause_of_a_recorded_failure_is_not_its_last_line() -> None:
    reader, _ = read_recorded("start-out-of-memory.jsonl", 1)
    cause = reader.root_cause()
    assert cause is not None
    assert cause.text.startswith("ValueError: Available memory on node 0 (6.7/8.96 GiB) on startup is less")
    assert cause.speaker.rank == 0
    assert "See root cause above" in reader.fatal[-1].text
    assert not reader.fatal[-1].is_root


def test_a_bar_that_is_printed_twice_is_one_rank() -> None:
    """The log of the founding case: the bar at 100 %, twice, and then nothing."""
    reader = sglang()
    for rank in range(8):
        say(reader, "Load weight begin. avail mem=94.4 GB", f"TP{rank}")
    for done in (0, 63, 64, 64):
        reader.feed(BAR.format(percent=100 * done // 64, done=done))
    assert reader.cursor(0).phase == "prepare"  # every file was opened; that is not loaded
    assert [reader.cursor(rank).phase for rank in range(1, 8)] == ["weights"] * 7
    assert reader.missing("weights") == []  # nobody has said it: nobody is missing


def test_the_ranks_that_have_not_reached_a_milestone_are_named() -> None:
    reader = sglang()
    for rank in (0, 2, 3, 5, 6):
        say(reader, "Load weight end. elapsed=812.1 s, type=DeepseekV3ForCausalLM", f"TP{rank}")
    assert reader.missing("weights") == [1, 4, 7]


def test_the_second_load_of_a_rank_is_the_drafter() -> None:
    reader = sglang(1)
    events = []
    for _ in range(2):
        events += say(reader, "Load weight begin. avail mem=94.4 GB", "TP0")
        events += reader.feed_all(BAR.format(percent=100 * done // 64, done=done) for done in (0, 32, 64))
        events += say(reader, "Load weight end. elapsed=1.0 s", "TP0")
    assert entered(events, 0) == ["weights", "prepare", "drafter"]
    assert (32, 64) in [(event.done, event.total) for event in events if event.phase == "drafter"]


def test_a_whole_start_of_sglang() -> None:
    reader = sglang(2)
    events = say(reader, "server_args=ServerArgs(model_path='m')")
    for rank in range(2):
        for text in (
            "Init parallel begin.",
            "Init parallel ends. elapsed=3.20 s",
            "Load weight begin. avail mem=94.4 GB",
            "Load weight end. elapsed=20 s",
            "Memory pool end. avail mem=12.1 GB",
            "Capture target decode CUDA graph begin. backend=full, num_tokens=[1], avail mem=12.0 GB",
            "Capture target decode CUDA graph end. elapsed=9.1 s",
            "max_total_num_tokens=412000, chunked_prefill_size=8192",
        ):
            events += say(reader, text, f"DP0 TP{rank} EP{rank}")
    events += reader.feed_all(["INFO:     Started server process [7]", "INFO:     Uvicorn running on x"])
    events += say(reader, "Decode batch, #running-req: 1", "DP0 TP0 EP0")
    expected = ["rendezvous", "weights", "prepare", "kv", "capture", "self-test", "serving"]
    assert entered(events, 0) == expected
    assert entered(events, None) == ["imports", "self-test"]
    assert reader.missing("engine") == []


@pytest.mark.parametrize(
    "begin", ["Init torch distributed begin.", "Capture cuda graph begin. This can take"]
)
def test_the_words_of_older_versions_are_known(begin: str) -> None:
    assert entered(say(sglang(1), begin, "TP0"), 0) in (["rendezvous"], ["capture"])


def test_lines_that_no_pattern_knows_are_kept() -> None:
    reader = sglang()
    assert say(reader, "something new happens", "TP3") == []
    assert list(reader.unknown) == [AT.format(labels=" TP3") + "something new happens"]


@pytest.mark.parametrize(
    ("line", "role", "rank", "pid"),
    [
        ("(Worker_TP1 pid=812) INFO 11-29 21:05:10 [x.py:1] hello", "rank", 1, 812),
        ("(Worker_PP1_TP1_EP0 pid=3) hello", "rank", 3, 3),
        ("(EngineCore_DP0 pid=9) ERROR 11-29 21:05:10 [core.py:2] hello", "core", None, 9),
        ("(APIServer pid=1) hello", "server", None, 1),
        ("(VllmWorker-2 pid=5) hello", "rank", 2, 5),
        ("hello", "", None, None),
    ],
)
def test_who_speaks(line: str, role: str, rank: int | None, pid: int | None) -> None:
    reader = GrammarReader(load_grammar("vllm"), Sizes(tensor=2, pipeline=2, ranks_here=4))
    speaker, text = reader.split(line)
    assert (speaker.role, speaker.rank, speaker.pid, text) == (role, rank, pid, "hello")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_grammar_names_our_phases_and_its_prefixes_fit(engine: str) -> None:
    grammar = load_grammar(engine)
    assert set(grammar.order()) <= set(PHASES)
    assert covers(grammar.versions, grammar.checked)
    reader = GrammarReader(grammar, Sizes(tensor=8, ranks_here=8))
    for prefix in grammar.prefixes:
        assert reader.split(prefix.example + "x")[1] == "x"


def test_an_engine_without_a_grammar_and_a_phase_without_a_meaning() -> None:
    with pytest.raises(UsageError, match="no log grammar of 'tgi'"):
        load_grammar("tgi")
    with pytest.raises(ValueError, match="unknown phases \\['lunch'\\]"):
        parse_grammar(_grammar_text("{phase: lunch, pattern: x, literals: [x]}"))


@pytest.mark.parametrize(
    ("versions", "version", "fits"),
    [
        (">=0.11,<0.34", "0.32.0", True),
        (">=0.11,<0.34", "0.34", False),
        (">=0.5.2,<0.6", "0.5.23.post1", True),
        ("<0.5.20", "0.5.6", True),
        ("==1.2", "1.2.0", True),
        (">1.2", "1.2.0rc1", False),
        ("", "3", True),
    ],
)
def test_version_ranges(versions: str, version: str, fits: bool) -> None:
    assert covers(versions, version) is fits


def test_drift_is_what_the_source_does_not_hold(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (tmp_path / "engine-1.5.0.dist-info").mkdir()
    (package / "a.py").write_text(
        'log("Begins with " "%d ranks")\nraise E(\n    "a long line "\n    f"of {n} parts"\n)\n'
    )
    grammar = _grammar(
        '{phase: build, pattern: x, literals: ["Begins with %d ranks", "a long line of "]}',
        "{phase: kv, pattern: x, literals: [It has moved away]}",
        '{phase: kv, pattern: x, literals: [only in the next one], versions: ">=2"}',
    )
    drift = check_package(grammar, package)
    assert (drift.version, drift.is_covered, drift.num_files) == ("1.5.0", True, 1)
    assert drift.found == ("Begins with %d ranks", "a long line of ")
    assert drift.missing == ("It has moved away",)
    with pytest.raises(UsageError, match="no Python source"):
        check_package(grammar, tmp_path / "nowhere")


def _grammar(*entries: str) -> Grammar:
    return parse_grammar(_grammar_text(*entries))


def _grammar_text(*entries: str) -> str:
    rows = "\n".join(f"  - {entry}" for entry in entries)
    return (
        'engine: engine\npackage: engine\ndistributions: [engine]\nversions: ">=1,<3"\nchecked: "1.5"\n'
        f"prefixes: []\nroles: {{}}\nphases: [build, kv]\nquiet_s: {{}}\nentries:\n{rows}\nfatal: []\n"
    )
