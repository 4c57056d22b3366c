"""`python -m peers`: sets up the peers, measures all of them in turns, and writes the page. For `make
bench-peers`.

Invariant: what was measured is stored before anything else is done, and a second call goes on where the
first one ended.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from firstlight.base.errors import FirstlightError, UsageError
from firstlight.facts.machine.machine import inspect_machine
from firstlight.facts.sources import resolve_model
from peers import page
from peers.environments import Environments
from peers.measures import MEASURES, Measure
from peers.quality import bench_quality
from peers.results import load, save, start_or_resume
from peers.rounds import Run
from peers.schedule import Schedule
from peers.settings import OURS, PEERS, Places, Setting, settings

REPOSITORY = Path(__file__).parents[2]
QUICK = ("launch", "first_64", "decode_1", "crowd_8")


def main() -> int:
    arguments = _parser().parse_args()
    console = Console(width=200, highlight=False)
    try:
        if arguments.report:
            write_page(arguments.output, console)
        else:
            measure(arguments, console)
    except FirstlightError as error:
        console.print(f"error: {error.explain()}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("broken off; the same command goes on from here")
        return 130
    return 0


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Set up, run, quality, table."""

    def say(line: str) -> None:
        console.print(line, markup=False)

    threads = arguments.threads or inspect_machine(with_gpus=False).num_usable_cores
    places = Places(REPOSITORY / ".peers", REPOSITORY / ".venv-vllm", resolve_model(None, say))
    places.folder.mkdir(exist_ok=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    environments = Environments(places, os.environ.get("TORCH_SPEC", "torch==2.13.0"), say)
    peers = _chosen(arguments.peers, PEERS) or PEERS
    missing = environments.make(peers)
    if arguments.setup:
        return
    schedule = Schedule(
        _settings(settings(places, threads), peers, missing, arguments.settings), _measures(arguments)
    )
    rounds = 1 if arguments.quick else arguments.rounds
    results = start_or_resume(
        arguments.output, rounds=rounds, threads=threads, model=str(places.gguf), fresh=arguments.fresh
    )
    results.versions = environments.versions()
    notes = {s.name: s.note for s in settings(places, threads)}
    results.notes = {**notes, **{f"missing {peer}": why for peer, why in missing.items()}}
    with Run(schedule, results, arguments.output, say) as run:
        run.all_rounds()
    if not arguments.quick and results.quality is None and not arguments.no_quality:
        results.quality = bench_quality(places.gguf, threads, say)
    save(arguments.output, results)
    say(page.table(results))
    say(f"stored in {arguments.output}; `make bench-peers-report` writes docs/performance.md from it")


def write_page(output: Path, console: Console) -> None:
    """docs/performance.md, its picture, and the results that they come from."""
    from peers.picture import draw

    results = load(output)
    docs = REPOSITORY / "docs"
    (docs / "images").mkdir(exist_ok=True)
    draw(results, docs / "images" / "performance.png")
    save(docs / "performance.json", page.without_places(results))
    (docs / "performance.md").write_text(page.whole(results), encoding="utf-8")
    console.print(f"written: {docs / 'performance.md'}", markup=False)


def _measures(arguments: argparse.Namespace) -> list[Measure]:
    known = tuple(measure.name for measure in MEASURES)
    names = _chosen(arguments.measures, known) or (QUICK if arguments.quick else known)
    return [measure for measure in MEASURES if measure.name in names]


def _settings(
    known: tuple[Setting, ...], peers: tuple[str, ...], missing: dict[str, str], named: str | None
) -> list[Setting]:
    chosen = [s for s in known if s.peer in peers and s.peer not in missing]
    if not named:
        return chosen
    names = _chosen(named, tuple(setting.name for setting in known))
    return [setting for setting in chosen if setting.name in names or setting.peer == OURS]


def _chosen(text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(filter(None, (text or "").split(",")))
    if unknown := set(names) - set(known):
        raise UsageError(f"{', '.join(sorted(unknown))} is not known.", f"Known: {', '.join(known)}.")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a result that counts")
    parser.add_argument("--peers", help=f"some of {','.join(PEERS)}")
    parser.add_argument("--settings", help='some of their settings, as "llama.cpp Q4_0,openvino int8 f32"')
    parser.add_argument("--measures", help=f"some of {','.join(m.name for m in MEASURES)}")
    parser.add_argument("--threads", type=int, default=0, help="of every engine; default: the usable cores")
    parser.add_argument("--quick", action="store_true", help="one round of the short measures")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever the results file holds")
    parser.add_argument("--setup", action="store_true", help="set up the peers, measure nothing")
    parser.add_argument("--no-quality", action="store_true", help="leave out the quality of our answers")
    parser.add_argument("--report", action="store_true", help="only write the page from the results file")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/peers.json"), help="the results file"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
