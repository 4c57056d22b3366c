"""The gates behind training: offline accuracy, the own loop, the export's probes, and the engine itself.

Invariant: the engine is compared with the own loop over the text that it made itself, so that the two differ
by the engine alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from firstlight.base.errors import FirstlightError
from firstlight.drafter.capture import Capturer, CaptureSettings
from firstlight.drafter.chain import eagle_proposer, run_chain
from firstlight.drafter.evaluate import EAGLE, IN_DOMAIN, REPORT, UNTRAINED, Line, Report, read_report
from firstlight.drafter.explain.documents import read_documents
from firstlight.drafter.explain.engine_run import acceptance_length, answer_in_engine
from firstlight.drafter.explain.order import Order
from firstlight.drafter.export import NATIVE
from firstlight.drafter.gates import Check, Gate, check, digest_of
from firstlight.drafter.probes import check_probes
from firstlight.drafter.progress import Meter
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target, read_ends
from firstlight.models.eagle3_file import load_eagle3

ACCURACY, LOOP, PROBE, ENGINE = "offline accuracy", "own loop", "export probe", "engine acceptance"
MIN_FIRST_ACCURACY = 0.3  # of the first draft, in domain: below, a drafter cannot pay for itself
MAX_LOOP_GAP = 0.15  # of the own loop from what the accuracies predict: rounds begin where the last one ended
MAX_ENGINE_GAP = 0.05  # of the engine from the own loop on the same answers
SURE_ENGINE_GAP = 0.2
SURE_DRAFTS_GAP = 0.5
MAX_DOCUMENTS = 48
MIN_ANSWERS, MIN_TOKENS = 30, 2000  # that an accuracy or an acceptance length is judged by


def gates_of_results(report: Report) -> list[Check]:
    """What the evaluation says, before anything is exported."""
    of = digest_of(report)
    return [
        Check(ACCURACY, of, partial(accuracy_gate, report)),
        Check(LOOP, of, partial(loop_gate, report)),
    ]


def gates_of_export(out: Path, target: Target, k: int, cpu_kernels: str = "auto") -> list[Check]:
    """What the exported folder is worth, by its probes and in the engine."""
    files = read_manifest(out / "export").files
    weights = {name: files[name] for name in files if name.startswith(f"{NATIVE}/") and name[-2:] != "md"}
    of = digest_of(weights, target.record)
    return [
        Check(PROBE, of, partial(probe_gate, out / "export" / NATIVE, target)),
        Check(ENGINE, digest_of(of, k, cpu_kernels), partial(engine_gate, out, target, k, cpu_kernels)),
    ]


def every_gate(out: Path, target: Target, attention: str) -> list[Check]:
    """Those of the states, and of what comes after as far as it is there, with the settings of the run."""
    found = check(out, target, attention)
    if not (out / "evaluate" / REPORT).exists():
        return found
    report = read_report(out)
    found += gates_of_results(report)
    if (out / "export" / NATIVE).exists():
        kernels = read_manifest(out / "capture").settings.get("cpu_kernels", "auto")
        found += gates_of_export(out, target, report.lines[0].k, kernels)
    return found


def accuracy_gate(report: Report) -> Gate:
    """The first draft must be right often enough in domain, before anything is served."""
    found = report.teacher_forced.get(IN_DOMAIN) or next(iter(report.teacher_forced.values()))
    first, length, k = found["accuracy"][0], found["predicted_acceptance_length"], found["k"]
    said = f"{100 * first:.1f} % of first drafts right, predicted acceptance length {length:.2f} at k = {k}"
    if (unsure := _too_few(report, ACCURACY, said)) is not None:
        return unsure
    passed = first >= MIN_FIRST_ACCURACY
    if not passed:
        said += ": too little data or training, or data of another kind (training)."
    return Gate(name=ACCURACY, passed=passed, said=said)


def loop_gate(report: Report) -> Gate:
    """The chain loop must reach what the accuracies predict, and more than a drafter that learned nothing."""
    group = IN_DOMAIN if IN_DOMAIN in report.teacher_forced else next(iter(report.teacher_forced))
    predicted = float(report.teacher_forced[group]["predicted_acceptance_length"])
    ours, untrained = (_line(report, name, group) for name in (EAGLE, UNTRAINED))
    said = (
        f"acceptance length {ours.acceptance_length:.2f} ({ours.low:.2f} to {ours.high:.2f}) at k = "
        f"{ours.k}, "
        f"predicted {predicted:.2f}, untrained {untrained.acceptance_length:.2f}"
    )
    if (unsure := _too_few(report, LOOP, said)) is not None:
        return unsure
    least = (1.0 - MAX_LOOP_GAP) * predicted
    if ours.high < least:
        said += ": drafts of the loop are worse than those of training, keys or feedback differ (training)."
    elif ours.acceptance_length <= untrained.acceptance_length:
        said += ": training made nothing better (training)."
    passed = ours.high >= least and ours.acceptance_length > untrained.acceptance_length
    return Gate(name=LOOP, passed=passed, said=said)


def probe_gate(folder: Path, target: Target) -> Gate:
    """The exported folder, read anew, must draft from the stored states what was stored."""
    try:
        said, passed = check_probes(folder, target, read_ends(target.checkpoint).embedding), True
    except FirstlightError as error:
        said, passed = f"{error} (integration)", False
    return Gate(name=PROBE, passed=passed, said=said)


def engine_gate(out: Path, target: Target, k: int, cpu_kernels: str = "auto") -> Gate:
    """The engine with the exported drafter must accept what the own loop accepts, on the same answers."""
    name, folder = ENGINE, out / "export" / NATIVE
    order = Order(
        target=target, drafter=folder, out=out, k=k, max_documents=MAX_DOCUMENTS, cpu_kernels=cpu_kernels
    )
    answers = read_documents(order).answers
    drafter = load_eagle3(
        folder, target.checkpoint.description, read_ends(target.checkpoint).embedding
    ).drafter
    prompts, lengths = zip(*((one.prompt_token_ids, len(one.token_ids)) for one in answers), strict=True)
    with Meter("answers of the engine", "tokens", sum(lengths)) as meter:
        made = answer_in_engine(order, list(prompts), list(lengths), meter.add)
    # Near ties fall to either side, so the loop runs over what the engine said and not over what was stored.
    settings = CaptureSettings(layers=drafter.config.state_layers, cpu_kernels=cpu_kernels)
    capturer = Capturer(target, settings, threads=0)
    emitted = rounds = 0
    for one in made:
        tokens = one.prompt + one.tokens
        states = capturer.states_of([tokens])[0][:-1, :-1]
        propose = eagle_proposer(drafter, states, tokens[1:])
        found = run_chain(tokens[1:], len(one.prompt) - 1, k, propose)
        emitted, rounds = emitted + found.emitted, rounds + found.num_rounds
    own, engine = emitted / max(rounds, 1), acceptance_length(made)
    gap = engine / own - 1.0
    said = f"{engine:.2f} in the engine, {own:.2f} in the own loop, k = {k}, {len(answers)} answers"
    num_tokens = sum(len(one.tokens) for one in made)
    # What no near tie makes, however few the answers: a fifth of the length, or half of the accepted drafts.
    is_clear = abs(gap) > SURE_ENGINE_GAP or abs(engine - own) > SURE_DRAFTS_GAP * (own - 1.0) > 0.0
    if not is_clear and (unsure := too_few(name, said, len(made), num_tokens)) is not None:
        return unsure
    passed = abs(gap) <= MAX_ENGINE_GAP
    if not passed:
        said += f": {100 * gap:+.0f} % (integration); firstlight drafter explain says which."
    return Gate(name=name, passed=passed, said=said)


def too_few(name: str, said: str, num_answers: int, num_tokens: int) -> Gate | None:
    """The word of a gate that judges by answers which are no more than a handful; None where they do."""
    if num_answers >= MIN_ANSWERS and num_tokens >= MIN_TOKENS:
        return None
    why = f"{num_answers} answers with {num_tokens:,} tokens; it takes {MIN_ANSWERS} and {MIN_TOKENS:,}"
    return Gate(name=name, passed=False, judged=False, said=f"{said}: too few to judge ({why})")


def _too_few(report: Report, name: str, said: str) -> Gate | None:
    group = IN_DOMAIN if IN_DOMAIN in report.teacher_forced else next(iter(report.teacher_forced))
    line = _line(report, EAGLE, group)
    return too_few(name, said, line.documents, line.tokens)


def _line(report: Report, drafter: str, group: str) -> Line:
    return next(line for line in report.lines if line.drafter == drafter and line.group == group)
