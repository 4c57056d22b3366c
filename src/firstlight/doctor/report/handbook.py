"""docs/doctor.md, made of the cards: how to use the doctor, how it looks, and every cause it knows.

Invariant: what the page says of a cause stands on its card and nowhere else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from firstlight.doctor.collect.registry import COLLECTORS
from firstlight.doctor.hypotheses.registry import HYPOTHESES
from firstlight.doctor.hypothesis import Card, Condition, Look, Remedies
from firstlight.doctor.looks import TEXTS
from firstlight.doctor.report.exit_codes import EXIT_CODES, MEANINGS

_INTRODUCTION = """\
# The doctor

<!-- Made by `make docs` from src/firstlight/doctor. Change it there. -->

`firstlight doctor` says what is the matter with a model server, why it thinks so, what speaks against it,
what it could not see, and what to do. It works on servers of firstlight, vLLM and SGLang, whoever started
them, as an ordinary user, without a GPU, and on servers that hang or are dead.

```
firstlight doctor                                   # all servers of this machine, one report for each
firstlight doctor --pid 4711                        # the server that this process belongs to
firstlight doctor --url http://127.0.0.1:8000       # the server that listens there
firstlight doctor --run /tmp/firstlight-ab12cd34    # a run of `firstlight serve`, also a dead one
firstlight doctor --watch                           # stay, and say when the verdict changes
firstlight doctor --generate                        # also ask for one token, as a client would
firstlight doctor --bundle stall.bundle             # also write all evidence into a file, without secrets
firstlight doctor --replay stall.bundle             # the same verdict from that file, on any machine
firstlight doctor --markdown                        # an issue for the engine's maintainers; also --json
```

An examination takes some three seconds, or ten when something hangs: what moves is looked at twice, two
seconds apart (`--looks`, `--interval`).

## Exit codes
"""

_READING = """\
Of several servers the worst decides: dead, stuck, unclear, slow, starting, healthy. Exit code 2: nothing
was found, or the options are wrong; 3: a bundle is damaged.

## How to read a report

The first line is the verdict: the condition, what happened, the cause and how sure it is.

- **proved**: an exit record, a dead holder, a process in state T: something that has no other explanation.
- **supported**: strong signs, and nothing against it that weighs as much.
- **suspected**: something points at it.
- **possible**: nothing speaks for it, and nothing excludes it. Listed only when the cause is unknown.

*Unknown* is a verdict. It comes with the causes that are left, in order, and with the three looks that
would decide between most of them, each with the command that takes it. Every claim cites its evidence (`E7
threads rank-0`), which `--json` shows and a bundle holds. Lines under *beware* name what looks like a sign
in this very case and is none.

Of a run of ours the supervisor has a verdict too, which it told its clients and left in the run's directory
(`verdict.json`). One event has one verdict: of what has ended the supervisor's words come first, and a cause
at the root behind them; of what stands still the doctor names another cause only where it is surer of it, and
then cites the supervisor's.

States of processes: *moving*, *slow* (useful progress, but little), *blocked* (none, every thread sleeps),
*spinning* (none, a core is busy, and for too long), *stopped*, *zombie*, *dead*, *idle* (it serves, and
nothing is asked of it), *unclear*.

## Bundles

`--bundle FILE` writes the evidence of all examined servers into one compressed file that only you can read,
and never over an existing one. Keys, tokens, passwords, cookies and private keys are taken out of
environments, command lines, logs, addresses and stacks, by the names they are given to and by their looks;
home folders become `~`, and so do their owners' names in other paths. Model names, host addresses and other
paths stay: read it (`zcat FILE`) before you give it away. With `--bundle` the verdict is judged from what
the file holds, so that `--replay` elsewhere gives the very same.

## What is never done

- No rank is stopped to be looked at: stacks are read by `py-spy --nonblocking`.
- No signal goes to a process whose handler is not known. The only one sent is SIGUSR1, to a rank or API
  process of firstlight that has installed its handler for it, and only where py-spy is refused and the
  supervisor cannot help.
- No lock and no cache is deleted, no process restarted, no GPU reset: remedies are told, not carried out.
- No process that is not yours is touched: what the kernel refuses is said to be refused.
- No proxy variable is heeded by probes, and no key is sent to a server of another user, unless you point at
  it.

## How it looks

Each look has a deadline, and one that fails or hangs is evidence itself. Where stacks are refused (Yama, a
container without rights), a living supervisor of `firstlight serve` takes them, as its ranks allow it to;
else the ranks write them themselves; else their black boxes tell the phase, and the rest is judged without.
"""

_CAUSES = """\
## The causes

A cause needs a sign to be more than possible, and a veto excludes it. *Recorded* causes were tested with
recorded or made-up evidence only: they need devices that were not at hand. Words in capitals are filled in
by the report.
"""
_ORDER = (Condition.DEAD, Condition.STUCK, Condition.SLOW, Condition.STARTING, Condition.UNCLEAR)
_HEADINGS = {
    Condition.DEAD: "When it is dead",
    Condition.STUCK: "When it is stuck",
    Condition.SLOW: "When it is slow",
    Condition.STARTING: "When it is on its way",
    Condition.UNCLEAR: "When it cannot be told",
    Condition.HEALTHY: "When it is healthy",
}


def handbook() -> str:
    """The whole page."""
    cards = [hypothesis.card for hypothesis in HYPOTHESES]
    recorded = sum(card.is_recorded for card in cards)
    parts = [
        _INTRODUCTION,
        *_table(("code", "condition", "meaning"), _exit_rows()),
        "",
        _READING,
        *_table(("look", "what", "by hand"), ((look.value, *map(_cell, TEXTS[look])) for look in Look)),
        "",
        f"They are made of {len(COLLECTORS)} collectors: {', '.join(one.name for one in COLLECTORS)}.",
        "",
        _CAUSES,
        f"{len(cards)} causes, {recorded} of them recorded.",
        "",
        *_contents(cards),
    ]
    for condition in (*_ORDER, Condition.HEALTHY):
        found = [card for card in cards if card.condition is condition]
        if found:
            parts += [f"## {_HEADINGS[condition]}", ""]
            for card in found:
                parts += _card(card)
    return "\n".join(parts).rstrip() + "\n"


def _exit_rows() -> Iterator[tuple[str, ...]]:
    for condition, number in EXIT_CODES.items():
        yield str(number), condition.value, MEANINGS[condition]


def _contents(cards: Iterable[Card]) -> list[str]:
    rows = ((f"[`{card.cause}`](#{card.cause})", card.condition.value, _cell(card.title)) for card in cards)
    return [*_table(("cause", "condition", "what it is"), rows), ""]


def _card(card: Card) -> Iterator[str]:
    yield f"### {card.cause}"
    yield ""
    yield f"{_sentence(card.title)}{' *Recorded.*' if card.is_recorded else ''}"
    yield ""
    yield from _bullets("Signs", card.signs)
    yield from _bullets("Vetoes", card.vetoes)
    yield from _bullets("Next test", (card.next_test,))
    if len({getattr(card.remedies, engine) for engine in Remedies.__struct_fields__}) == 1:
        yield from _bullets("Remedy", (card.remedies.native,))
    else:
        for engine in Remedies.__struct_fields__:
            yield from _bullets(f"Remedy for {engine}", (getattr(card.remedies, engine),))
    yield f"- Looks: {', '.join(look.value for look in card.looks)}"
    yield ""


def _bullets(title: str, texts: tuple[str, ...]) -> list[str]:
    shown = [_filled(text).strip() for text in texts if text.strip()]
    return [f"- {title}: {'; '.join(shown)}"] if shown else []


def _filled(text: str) -> str:
    """Fields as words in capitals, as the verdict leaves them when nothing fills them."""
    return (
        re.sub(r"(?<!\{)\{([a-z_]+)\}(?!\})", lambda match: match[1].upper(), text)
        .replace("{{", "{")
        .replace("}}", "}")
    )


def _sentence(text: str) -> str:
    shown = text[:1].upper() + text[1:]
    return shown if shown.endswith(".") else f"{shown}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(headings)} |",
        f"|{'|'.join('---' for _ in headings)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    sys.stdout.write(handbook())
