"""Ports, proxies, and servers that answer without serving.

Invariant: a trouble of the surroundings is named with the variable, number or owner that shows it.
"""

from __future__ import annotations

from collections import Counter

from firstlight.doctor.case.target import Engine
from firstlight.doctor.case.values_host import Generation, HttpProbe, Sockets
from firstlight.doctor.case.values_process import BlackBoxSeen, Descriptors, InputOutput
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import (
    Card,
    Clue,
    Condition,
    Hypothesis,
    Judgement,
    Look,
    Remedies,
    Weight,
    same,
)
from firstlight.doctor.motion.motion import State
from firstlight.doctor.report import describe

_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy")
_PROXY_WORDS = (
    r"ProxyError",
    r"Tunnel connection failed",
    r"502 Bad Gateway",
    r"warm-?up (failed|error).*(403|502|503|[Pp]roxy)",
    r"Initialization failed\. warmup error",
)


def _port(view: View) -> Judgement | None:
    words = stated(view, r"Address already in use", r"EADDRINUSE", r"port \d+ is (taken|in use|already)")
    other = _other_listener(view)
    if words is None and other is None:
        return None
    clues = ([other] if other else []) + ([words[0]] if words else [])
    where = " and ".join(f"{host}:{port}" for host, port in view.case.target.addresses) or "its port"
    return Judgement(
        supports=tuple(clues),
        subject=words[1] if words else None,
        condition=Condition.DEAD if not view.motion.living_ranks else Condition.STUCK,
        summary=f"another process has {where}: {clues[0].text}.",
        fills={"port": str(view.case.target.addresses[0][1]) if view.case.target.addresses else "PORT"},
    )


def _other_listener(view: View) -> Clue | None:
    """Somebody else who listens where the server should."""
    ports = {port for _, port in view.case.target.addresses}
    ours = {process.key for process in view.case.target.processes}
    for seen in view.case.all(Sockets, look=view.case.last_look):
        listening = [e for e in seen.value.sockets if e.state == "LISTEN" and e.protocol == "tcp"]
        found = [e for e in listening if e.local.rpartition(":")[2] in {str(port) for port in ports}]
        if view.case.failures("descriptors") and not any(end.owners for end in found):
            continue  # we may not see who has it: it may well be the server itself
        if found and ours and not any(owner in ours for end in found for owner in end.owners):
            owners = ", ".join(found[0].owners) or "a process of another user"
            text = f"{owners} listens on {found[0].local}, not this server"
            return Clue(text=text, evidence=(seen.id,), weight=Weight.PROOF)
    return None


PORT = Hypothesis(
    Card(
        cause="port-taken",
        title="another process has the port",
        condition=Condition.DEAD,
        signs=("EADDRINUSE", "a listener on the server's port that is none of its processes"),
        vetoes=("the port is free, or the server's own",),
        next_test="`ss -ltnp 'sport = :{port}'`.",
        remedies=Remedies(
            native="`--port` another, or end the other one.",
            vllm="`--port` another, well below the ephemeral range (32768 and up), or end the other one.",
            sglang="`--port` another (it also uses port + 1 and up), or end the other one.",
        ),
        looks=(Look.SOCKETS, Look.LOGS),
    ),
    _port,
)


def _proxy(view: View) -> Judgement | None:
    set_ = [(name, value, id_) for name, value, id_ in view.variable(*_PROXIES) if value]
    if not set_:
        return None
    excepted = " ".join(value for _, value, _ in view.variable("NO_PROXY", "no_proxy"))
    name, value, id_ = set_[0]
    if any(word in excepted for word in ("*", "127.0.0.1", "localhost")):
        text = f"NO_PROXY excepts this machine ({excepted})"
        return Judgement(vetoes=(Clue(text=text, evidence=(id_,)),))
    clues = [Clue(text=f"{name}={value}, and NO_PROXY does not except 127.0.0.1", evidence=(id_,))]
    if words := stated(view, *_PROXY_WORDS):
        clues.append(words[0])
    clues += _connected_to(view, value)
    if len(clues) == 1 and not (view.is_starting and view.motion.state is not State.MOVING):
        return None
    return Judgement(
        supports=tuple(clues),
        subject=words[1] if words else None,
        condition=Condition.DEAD if view.motion.state in (State.DEAD, State.ZOMBIE) else Condition.STUCK,
        summary=f"the warm-up request goes to the proxy in {name} ({value}) instead of to the server itself.",
    )


def _connected_to(view: View, proxy: str) -> list[Clue]:
    """A connection to the proxy that waits."""
    place = proxy.rpartition("://")[2].strip("/").rpartition("@")[2]
    port = place.rpartition(":")[2]
    for seen in view.case.all(Sockets, look=view.case.last_look):
        for end in seen.value.sockets:
            is_there = end.remote.rpartition(":")[2] == port and end.state in ("ESTABLISHED", "SYN_SENT")
            if is_there and port.isdigit() and end.protocol == "tcp":
                text = f"{', '.join(end.owners)} has a connection to the proxy ({end.remote}, {end.state})"
                return [Clue(text=text, evidence=(seen.id,), weight=Weight.STRONG)]
    return []


PROXY = Hypothesis(
    Card(
        cause="proxy-in-the-way",
        title="a proxy variable catches the server's own warm-up request",
        condition=Condition.STUCK,
        signs=("HTTP_PROXY without a NO_PROXY for 127.0.0.1", "502, 403 or silence for the warm-up"),
        vetoes=("no proxy variable", "NO_PROXY excepts 127.0.0.1"),
        next_test="`curl --noproxy '*' http://127.0.0.1:PORT/health` against the same without `--noproxy`.",
        remedies=Remedies(
            native="start with NO_PROXY=127.0.0.1,localhost; our own warm-up never uses a proxy.",
            vllm="start with NO_PROXY=127.0.0.1,localhost.",
            sglang="start with NO_PROXY=127.0.0.1,localhost; `--skip-server-warmup` tells if it is that.",
        ),
        looks=(Look.ENVIRONMENT, Look.LOGS, Look.SOCKETS),
    ),
    _proxy,
)


def _green(view: View) -> Judgement | None:
    tried = [seen for seen in view.case.all(Generation) if not seen.value.has_token]
    healthy = [seen for seen in view.case.all(HttpProbe) if seen.value.status == 200]
    waits = bool(view.motion.serving.num_requests) and view.motion.serving.is_up
    counted = any(view.case.pair(BlackBoxSeen, one.key) for one in view.ranks)
    steps = any(item.what in ("steps", "operators") for one in view.ranks for item in one.progress)
    stands = waits and counted and not steps and view.has_stopped_moving
    if view.motion.serving.is_generating or not (tried or stands):
        return None
    if not healthy and not view.motion.serving.is_up:
        return None
    clues = [
        Clue(text=f"{seen.value.url} answers 200", evidence=(seen.id,), group="green") for seen in healthy[:1]
    ]
    if tried:
        text = f"no token came within {tried[0].value.seconds:.0f} s ({tried[0].value.note[:100]})"
        clues.append(Clue(text=text, evidence=(tried[0].id,), weight=Weight.STRONG, group="token"))
    if stands:
        text = f"{view.motion.serving.num_requests} requests wait, and no rank made a step between two looks"
        ids = view.motion.serving.evidence[:4]
        clues.append(Clue(text=text, evidence=ids, weight=Weight.STRONG, group="steps"))
    spinning = view.motion.with_state(State.SPINNING)
    why = tuple(
        Clue(text=f"{describe.named(view, one.key)} spins, which is why", evidence=one.evidence)
        for one in spinning[:1]
    )
    return Judgement(
        supports=tuple(clues),
        contradicts=why,
        subject=view.suspect.key if view.suspect else None,
        summary="it says that it is healthy, but does not serve: "
        f"{'; '.join(clue.text for clue in clues[-1:])}{_suspect(view)}.",
    )


def _suspect(view: View) -> str:
    if view.suspect is None:
        return ""
    frames = describe.stack(view, view.suspect.key)
    return f"; {describe.named(view, view.suspect.key)}{f' is in {frames}' if frames else ''}"


GREEN = Hypothesis(
    Card(
        cause="green-not-serving",
        title="/health is green, but nothing is generated",
        condition=Condition.STUCK,
        signs=("/health answers 200", "a generation times out, or requests wait and no step is made"),
        vetoes=("a token arrives",),
        next_test="`firstlight doctor --generate`: one token through the real path.",
        remedies=Remedies(
            native="report it with a bundle and restart; `--on-stall restart` does so by itself.",
            vllm="probe `/v1/completions` with one token instead of `/health`, and restart.",
            sglang="probe `/health_generate` instead of `/health`, and restart.",
        ),
        looks=(Look.GENERATION, Look.STACKS),
        depth=2,
    ),
    _green,
)


def _buffered(view: View) -> Judgement | None:
    """Only for a server that moves while its log does not: a flat one cannot be explained by a buffer.

    Ours is left out, as the supervisor drains its pipes and its ranks mostly have nothing to say.
    """
    if view.case.target.engine is Engine.NATIVE:
        return None
    for one in view.workers:
        seen, io = view.case.seen(Descriptors, one.key), view.case.pair(InputOutput, one.key)
        out = seen.value.inode_of(1) if seen else None
        if seen is None or out is None or out.kind != "pipe" or io is None:
            continue
        if io.second.value.wchar != io.first.value.wchar or not one.progress:
            continue
        text = f"{one.key} writes its output into a pipe, and wrote nothing while it moved"
        return Judgement(
            supports=(Clue(text=text, evidence=(seen.id, *io.ids), weight=Weight.SOME),),
            subject=one.key,
            summary=f"{describe.named(view, one.key)} moves; its output may only be held back in a buffer.",
        )
    if view.has_stopped_moving:
        veto = Clue(text="nothing moves: a buffer cannot explain that", evidence=view.motion.evidence[:4])
        return Judgement(vetoes=(veto,))
    return None


BUFFERED = Hypothesis(
    Card(
        cause="output-buffered",
        title="only the output is held back; the server works",
        condition=Condition.STARTING,
        signs=("standard output is a pipe, wchar does not move, while processor or bytes do",),
        vetoes=("nothing moves",),
        next_test="ask the port, not the log: `curl http://127.0.0.1:PORT/health`.",
        remedies=same("PYTHONUNBUFFERED=1, or `stdbuf -oL` for the programs behind the pipe."),
        looks=(Look.BYTES, Look.MOTION),
        depth=2,
    ),
    _buffered,
)


def _hidden(view: View) -> Judgement | None:
    refused = [seen for seen in view.case.failures() if seen.value.is_refused]
    subjects = {seen.subject for seen in refused}
    standing = (State.UNCLEAR, State.BLOCKED)
    hidden = [one for one in view.workers if one.key in subjects and one.state in standing]
    if not hidden:
        return None
    uids = Counter(process.uid for process in view.case.target.processes)
    of = {process.key: process.uid for process in view.case.target.processes}
    hidden.sort(key=lambda one: uids[of.get(one.key)])  # the odd one first
    ids = tuple(seen.id for seen in refused if seen.subject == hidden[0].key)[:4]
    names = ", ".join(describe.named(view, one.key) for one in hidden[:4])
    text = f"the kernel refuses us the files of {names}: they belong to another user"
    return Judgement(
        supports=(Clue(text=text, evidence=ids, weight=Weight.SOME),),
        subject=hidden[0].key,
        condition=Condition.STUCK if view.has_stopped_moving else None,
        summary=f"{names} cannot be looked into from here: another user's"
        f"{'; nothing of the server moves' if view.has_stopped_moving else ''}.",
    )


HIDDEN = Hypothesis(
    Card(
        cause="hidden-process",
        title="processes that belong to another user cannot be seen",
        condition=Condition.UNCLEAR,
        signs=("EPERM from /proc/PID/io, fd, environ; py-spy refused",),
        vetoes=("all processes could be read",),
        next_test="`sudo firstlight doctor`, or as the user of the server.",
        remedies=same("run the doctor as the server's user, or with `sudo`."),
        looks=(),
        depth=2,
    ),
    _hidden,
)
HYPOTHESES = (PORT, PROXY, GREEN, BUFFERED, HIDDEN)
