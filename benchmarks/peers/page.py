"""docs/performance.md out of a results file: table, goals, picture, quality, method. Pure.

Used by `__main__`. Invariant: the page follows from the results alone and is never edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from peers.goals import (
    Best,
    Goal,
    best,
    best_multiply,
    goals,
    limits,
    measures_taken,
    peer_of,
    peers_measured,
)
from peers.measures import KV_TOKENS, MAX_SEQUENCES, QUESTIONS, Measure, num_right
from peers.results import LIMITS, Results
from peers.schedule import BEHIND
from peers.settings import OPENVINO, OURS, PEERS, TRANSFORMERS, VLLM

_HEAD = """# Performance on a CPU

{model} on {processor}, {threads} threads for every engine, {start} to {end} (UTC), firstlight {version}.
Written by `make bench-peers-report` from [performance.json](performance.json), which holds every single
measurement; not edited by hand.

![firstlight beside its peers](images/performance.png)

## Figures

Medians of the rounds (least to most); each peer in its best setting for that figure, which is named where
there are several. *Limit*: what this machine's memory and multipliers let any engine reach with these
weights, from rates measured in the same run.
"""

_METHOD = """## Method

- **One run.** In each of {rounds} rounds every engine is started, asked {num_questions} plain questions,
  greedily and by the chat template, warmed up, measured and ended, one after the other; only one runs at a
  time. {vllm} takes so long to start that it is launched once, and stopped by a signal (SIGSTOP) while
  others are measured. {transformers} takes part in every other round.
- **Validity.** A setting with more than one wrong answer in any visit is not a valid one, ours included. One
  is let through because a single greedy answer may hang on a near tie: in float32 the first token of the
  right answer to *What is the capital of France?* leads by 0.08 nats only.
- **Settings.** After the first round a setting goes on only with figures in which a goal compares its peer
  with ours, and was within {behind:.2f}x of the best one there; all other figures are of one round, "(1)".
- **Load.** Prompts are random token ids, the same for all engines in a round and new in each; prefix caches
  help nobody. HTTP engines are measured by the client of `firstlight bench serving`, which takes its share
  of the same cores; {openvino} and {transformers} run in process, without HTTP, which flatters them.
- **Figures.** *Decode*: 64 prompt and 128 new tokens, one request at a time, 1 / time per output token.
  *Concurrency N*: N requests of 64 and 128 tokens at once, all new tokens over the whole time. *Prefill*:
  512 / time to first token. *Launch*: from the start of the process until a first token was answered, files
  in the page cache. *Memory*: the summed PSS of all processes after the concurrent load, with room for
  {kv:,} tokens in the KV cache and {sequences} sequences in every engine; each keeps its own default type
  of the KV, so {openvino}'s is half as large.
- **Limits.** The bandwidth of reading 256 MB, and the fastest of: 8-bit products out of registers, torch's
  float32 and bfloat16 matrix products. A step reads the file's weights once ({weights:.1f} MB) or
  multiplies for all its rows, whichever takes longer.
- A shared machine is noisy: read differences under 20 % as nothing.

## Repeat it

```
make bench-peers           # sets up the peers in .peers and .venv-vllm (6 GB), measures; goes on later
make bench-peers-report    # writes this page
```

`make bench-peers ARGS="--quick --peers firstlight,openvino --fresh --output /tmp/try.json"` is a look in a
few minutes; `--rounds`, `--peers`, `--settings` and `--measures` choose. The first call builds llama.cpp,
which takes ten minutes.
"""


def whole(results: Results) -> str:
    """The page."""
    times = [sample.time for sample in results.samples if sample.time]
    head = _HEAD.format(
        model=results.model.rpartition("/")[2],
        processor=results.provenance.get("processor", "an unknown processor"),
        threads=results.threads,
        start=_short(min(times, default="")),
        end=_short(max(times, default="")),
        version=results.provenance.get("firstlight", "?"),
    )
    method = _METHOD.format(
        rounds=results.rounds_run,
        num_questions=len(QUESTIONS),
        behind=BEHIND,
        vllm=VLLM,
        openvino=OPENVINO,
        transformers=TRANSFORMERS,
        kv=KV_TOKENS,
        sequences=MAX_SEQUENCES,
        weights=results.facts.get("weight_bytes", 0) / 1e6,
    )
    parts = [head.rstrip(), _unfinished(results), table(results), _goals(results), _machine(results)]
    parts.append(_quality(results))
    return "\n\n".join(filter(None, [*parts, _settings(results), method.rstrip()])) + "\n"


def _unfinished(results: Results) -> str:
    """What a reader must know of a run that was broken off, or of peers that were left out."""
    measured = {peer_of(sample.setting) for sample in results.samples}
    absent = [peer for peer in PEERS if peer not in measured]
    said = []
    if results.rounds_run < results.rounds:
        said.append(f"Broken off: {results.rounds_run} of {results.rounds} rounds were run.")
    if absent:
        said.append(f"Not in this run: {', '.join(absent)}.")
    return " ".join(said)


def table(results: Results) -> str:
    """The figures, one measure a row."""
    peers, ceilings = peers_measured(results), limits(results)
    rows = []
    for measure in measures_taken(results):
        cells = [_cell(best(results, [peer], measure), measure) for peer in peers]
        limit = f"{ceilings[measure.name]:,.{_digits(measure)}f}" if measure.name in ceilings else ""
        rows.append([f"{measure.label}, {measure.unit}", *cells, limit])
    in_process = {OPENVINO: "openvino (in process)", TRANSFORMERS: "transformers (in process)"}
    return _markdown(["", *(in_process.get(peer, peer) for peer in peers), "limit"], rows)


def without_places(results: Results) -> Results:
    """The same without paths of the machine that it ran on."""
    model = results.model.rpartition("/")[2]
    quality = results.quality and {**results.quality, "model": model}
    return msgspec.structs.replace(results, model=model, quality=quality)


def _goals(results: Results) -> str:
    rows = [_goal(goal) for goal in goals(results)]
    return "## Goals\n\n" + _markdown(["", "goal", "peer to beat", "found", "reached"], rows)


def _goal(goal: Goal) -> list[str]:
    verdict = {True: "yes", False: "**no**", None: ""}[goal.reached]
    return [goal.label, goal.wanted, goal.rival or "", goal.found, verdict]


def _machine(results: Results) -> str:
    read, multiply = results.median(LIMITS, "read_bytes_per_s"), best_multiply(results)
    if read is None or multiply is None:
        return ""
    values = results.values(LIMITS, "read_bytes_per_s")
    spread = f"{min(values) / 1e9:.1f} to {max(values) / 1e9:.1f}"
    return (
        f"The machine read {read / 1e9:.1f} GB/s ({spread} over the rounds) and multiplied "
        f"{multiply / 1e9:,.0f} G operations/s (medians, {results.threads} threads)."
    )


def _quality(results: Results) -> str:
    if results.quality is None:
        return ""
    quality, long, answers = (results.quality, *(results.quality[n] for n in ("long_text", "answers")))
    rows = [
        [
            str(gap["rows_per_step"] or "whole text"),
            f"{gap['kl_mean']:.1e}",
            f"{gap['kl_p99']:.1e}",
            f"{gap['agreement']:.1%}",
        ]
        for gap in quality["gaps"]
    ]
    differing = [one for one in answers if one["fast"] != one["exact"]]
    lines = [
        "## Quality",
        "Against the same weights in float32, which rounds nothing (`firstlight bench quality --full "
        "--cpu-kernels auto`).",
        _markdown(["rows a step", "KL a token, mean", "99 %", "same likeliest token"], rows),
        f"Perplexity on {long['num_bytes']:,} bytes of {long['source']} ({long['num_tokens']:,} tokens): "
        f"{long['perplexity']:.4f}, in float32 {long['reference_perplexity']:.4f} "
        f"({long['perplexity'] / long['reference_perplexity'] - 1:+.3%}); KL a token {long['kl_mean']:.1e}.",
        f"Greedy answers to {len(answers)} questions: {len(answers) - len(differing)} are the same.",
    ]
    if differing:
        lines.append(
            _markdown(["question", "ours from where they part", "in float32"], map(_difference, differing))
        )
    return "\n\n".join(lines)


def _difference(answer: dict[str, str]) -> list[str]:
    """Some characters before the first that differs, and after."""
    fast, exact = answer["fast"], answer["exact"]
    pairs = enumerate(zip(fast, exact, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(fast), len(exact)))
    start = max(0, at - 20)
    return [answer["question"], *(f"…{text[start : at + 40]}…" for text in (fast, exact))]


def _settings(results: Results) -> str:
    names = [n for n in dict.fromkeys(s.setting for s in results.samples) if n != LIMITS]
    rows = []
    for name in names:
        answers = results.answers(name)
        verdict = "right" if results.is_valid(name) else "**wrong**" if answers else "none"
        worst = min(answers, key=num_right, default=[])
        verdict += f", {num_right(worst)} of {len(worst)}" if worst else ""
        rows.append([name, results.notes.get(name, ""), verdict, " / ".join(map(_flat, worst))])
    versions = ", ".join(dict.fromkeys(results.versions.values()))
    parts = [
        "## Settings",
        f"{versions}.",
        _markdown(["setting", "what it is", "answers", "those of the worst visit"], rows),
    ]
    absent = [f"- {name}: {why}" for name, why in results.notes.items() if name.startswith("missing ")]
    failed = [f"- round {s.round}, {s.setting}, {s.measure}: {s.error}"[:300] for s in results.errors()]
    if absent or failed:
        parts += ["Not measured:", "\n".join(map(_flat, absent + failed))]
    return "\n\n".join(parts)


def _cell(found: Best | None, measure: Measure) -> str:
    if found is None:
        return "–"
    digits = _digits(measure)
    spread = f" ({found.least:,.{digits}f}–{found.most:,.{digits}f})" if found.count > 1 else " (1)"
    variant = found.setting.partition(" ")[2]
    text = f"{found.value:,.{digits}f}{spread} {variant}".strip()
    return f"**{text}**" if peer_of(found.setting) == OURS else text


def _digits(measure: Measure) -> int:
    return 2 if measure.unit == "s" else 1 if measure.unit == "ms" else 0


def _markdown(columns: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return _flat(cell).replace("|", "\\|").replace("<", "&lt;")


def _flat(text: str) -> str:
    return " ".join(text.split())


def _short(time: str) -> str:
    return time[:16].replace("T", " ")
