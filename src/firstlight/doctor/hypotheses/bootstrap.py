"""Ranks that cannot reach each other: the wrong interface, a firewall, packets that RDMA loses.

Invariant: a connection that is being tried is told from the socket tables alone; one to a hub's port is not
the ranks' and is left to others.
"""

from __future__ import annotations

import re

from firstlight.base.loopback import is_here
from firstlight.doctor.case.evidence import Seen
from firstlight.doctor.case.target import Role
from firstlight.doctor.case.values_device import NicCounters, NicPort
from firstlight.doctor.case.values_host import SocketEnd, Sockets
from firstlight.doctor.case.view import View
from firstlight.doctor.hypotheses.gpu_case import (
    about,
    argument,
    in_main_stack,
    is_silent_start,
    line_clue,
    num_ranks,
    place_clue,
    uses_gpus,
)
from firstlight.doctor.hypotheses.texts import stated
from firstlight.doctor.hypothesis import Card, Clue, Condition, Hypothesis, Judgement, Look, Remedies, Weight
from firstlight.doctor.motion.motion import State
from firstlight.doctor.report import describe

_WORDS = (
    r"connectFullMesh failed",
    r"Unable to resolve hostname to a \(local\) address",
    r"no socket interface found",
    r"NET/Socket.{0,40}No interface found",
    r"Unable to find address for",
    r"The client socket has timed out after",
    r"socketStartConnect: Connect to .{0,60} failed",
    r"socketPollConnect",
)
_STACK = (r"rendezvous\.py:", r"init_process_group", r"ncclCommInitRank", r"pynccl.*:__init__", r"TCPStore")
_OUTSIDE_PORTS = ("80", "443", "3128", "8080")
_OUTSIDE_VARIABLES = ("HF_ENDPOINT", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_TRYING = ("SYN_SENT",)
_FATAL_STATES = (State.DEAD, State.ZOMBIE)


def _bootstrap(view: View) -> Judgement | None:
    count = num_ranks(view)
    trying, stalled = _trying(view), _stalled(view)
    words = stated(view, *_WORDS)
    places = in_main_stack(view, *_STACK) if view.has_stopped_moving else []
    if count == 1 and not trying and words is None and not _num_nodes(view) > 1:
        return Judgement(vetoes=(Clue(text="there is one rank only", evidence=view.motion.evidence[:2]),))
    supports = [words[0]] if words else []
    if trying:
        supports.append(trying[1])
    if stalled:
        supports.append(stalled[1])
    if places and (supports or uses_gpus(view)):
        supports.append(place_clue(places[0], Weight.WEAK))
    met = view.find_line(r"Init COMPLETE")
    contradicts = []
    if met is not None and not trying and words is None:
        contradicts.append(line_clue(met, Weight.WEAK))
    if not supports and not (is_silent_start(view) and uses_gpus(view)):
        return None
    if any(one.state in _FATAL_STATES for one in view.ranks):
        contradicts.append(
            Clue(text="a rank is dead: nobody can reach it", evidence=view.motion.evidence[:2])
        )
    key = trying[0] if trying else stalled[0] if stalled else words[1] if words else None
    who = describe.named(view, key) if key else "a rank"
    where = trying[2] if trying else stalled[2] if stalled else "the others"
    return Judgement(
        supports=tuple(supports),
        contradicts=tuple(contradicts),
        subject=key,
        summary=f"{who} does not get through to {where}."
        if trying or stalled
        else f"ranks do not find each other over the network{f': {words[0].text}' if words else ''}.",
        fills={"peer": where.replace(":", " ", 1) if trying or stalled else "HOST PORT"},
    )


def _num_nodes(view: View) -> int:
    told = argument(view, "--nnodes", "nnodes") or "1"
    return int(told) if told.isdigit() else 1


def _ends(view: View, look: int) -> tuple[Seen[Sockets], dict[int, SocketEnd]] | None:
    """TCP sockets of the ranks, or of the engine's other processes, by inode."""
    seen = next(iter(view.case.all(Sockets, look=look)), None)
    if seen is None:
        return None
    roles = (Role.RANK, Role.ENGINE, Role.API)
    mine = {process.key for process in view.case.target.processes if process.role in roles}
    return seen, {
        end.inode: end for end in seen.value.sockets if end.protocol == "tcp" and mine & set(end.owners)
    }


def _is_outside(view: View, end: SocketEnd) -> bool:
    """A hub or a proxy, by its port or by the variables that name one."""
    port = end.remote.rpartition(":")[2]
    named = [text for _, text, _ in view.variable(*_OUTSIDE_VARIABLES)]
    return port in _OUTSIDE_PORTS or any(re.search(rf":{port}\b", text) for text in named)


def _trying(view: View) -> tuple[str, Clue, str] | None:
    """(who, clue, where to) of a connection that gets no answer, in both looks if there were two."""
    first, last = _ends(view, 0), _ends(view, view.case.last_look)
    if last is None:
        return None
    for end in last[1].values():
        if end.state not in _TRYING or _is_outside(view, end):
            continue
        old = first[1].get(end.inode) if first else None
        is_old = first is not None and first[0].id != last[0].id and old is not None and old.state in _TRYING
        text = (
            f"{end.owners[0]} gets no answer from {end.remote} (SYN_SENT{' in both looks' if is_old else ''})"
        )
        weight = Weight.STRONG if is_old or view.case.last_look == 0 else Weight.SOME
        ids = (first[0].id, last[0].id) if first and is_old else (last[0].id,)
        return end.owners[0], Clue(text=text, evidence=ids, weight=weight, group="sockets"), end.remote
    return None


def _stalled(view: View) -> tuple[str, Clue, str] | None:
    """(who, clue, where to) of data that another machine has not taken between two looks."""
    first, last = _ends(view, 0), _ends(view, 1)
    if first is None or last is None:
        return None
    for inode, end in last[1].items():
        old = first[1].get(inode)
        if old is None or end.state != "ESTABLISHED" or end.peers or is_here(end.remote):
            continue
        if end.send_bytes and end.send_bytes == old.send_bytes and not _is_outside(view, end):
            text = (
                f"{end.send_bytes} bytes from {end.owners[0]} to {end.remote} wait to be taken, in both looks"
            )
            clue = Clue(text=text, evidence=(first[0].id, last[0].id), weight=Weight.STRONG, group="queue")
            return end.owners[0], clue, end.remote
    return None


BOOTSTRAP_NETWORK = Hypothesis(
    Card(
        cause="bootstrap-network",
        title="ranks do not reach each other over the network (interface, address or firewall)",
        condition=Condition.STUCK,
        signs=(
            "a rank's connection in SYN_SENT in two looks; bytes to another machine that nobody takes",
            "`connectFullMesh failed`, `Unable to resolve hostname to a (local) address`",
            "before NCCL's `Init COMPLETE`; several interfaces, docker0, IPv6",
        ),
        vetoes=("one rank only",),
        next_test="`ss -tnp state syn-sent`; `nc -zv {peer}` from the same machine; NCCL_DEBUG=INFO and its "
        "line `Bootstrap : Using`.",
        remedies=Remedies(
            native="our ranks meet on this machine over 127.0.0.1: look for a firewall on lo, and set "
            "GLOO_SOCKET_IFNAME=lo (CPU) or NCCL_SOCKET_IFNAME=lo (GPU).",
            vllm="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that all nodes share, "
            "VLLM_HOST_IP to this node's address on it; open the ports between the nodes.",
            sglang="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that all nodes share, "
            "`--dist-init-addr` with an address on it; open the ports between the nodes.",
        ),
        looks=(Look.SOCKETS, Look.STACKS, Look.LOGS),
        prior=2,
    ),
    _bootstrap,
)

_NIC_ERRORS = re.compile(
    r"packet_seq_err|roce_adp_retrans|retries_exceeded|out_of_sequence|timeout_err|retrans|rnr_nak|symbol_error"
    r"|port_rcv_errors|link_downed|local_link_integrity|duplicate_request|implied_nak"
)
_RDMA_STACK = (r"ibv_", r"nvshmem", r"deep_ep.*:", r"rdma", r"mooncake.*:")
_RDMA_WORDS = (
    r"NET/IB.{0,120}(?:error|failed|timed? ?out|status)",
    r"ibv_\w+ failed",
    r"transport retry counter exceeded",
    r"nvshmem.{0,80}(?:error|failed)",
    r"Found 0 HCAs",
    r"Got completion .{0,60}status=12",
)


def _rdma(view: View) -> Judgement | None:
    if not uses_gpus(view):
        return None
    words, grown = stated(view, *_RDMA_WORDS), _grown(view)
    places = in_main_stack(view, *_RDMA_STACK, innermost=20) if view.has_stopped_moving else []
    is_single = _num_nodes(view) == 1 and not any(view.variable("NVSHMEM_BOOTSTRAP"))
    if is_single and words is None and not places:
        return (
            Judgement(vetoes=(Clue(text="there is one node only", evidence=about(view)),)) if grown else None
        )
    if words is None and not grown and not places:
        return None
    supports = [words[0]] if words else []
    supports += [grown] if grown else []
    supports += [place_clue(place, Weight.SOME) for place in places[:1]]
    return Judgement(supports=tuple(supports), subject=words[1] if words else None)


def _grown(view: View) -> Clue | None:
    """Error counters that rose between the looks."""
    looks = view.case.all(NicCounters)
    if len(looks) < 2:
        return None
    before = {(port.device, port.port): port for port in looks[0].value.ports}
    rows = []
    for port in looks[-1].value.ports:
        for name, count in _differences(before.get((port.device, port.port)), port):
            rows.append(f"{port.device} port {port.port}: {name} +{count}")
    if not rows:
        return None
    ids = (looks[0].id, looks[-1].id)
    text = f"errors of network adapters rise: {'; '.join(rows[:6])}"
    return Clue(text=text, evidence=ids, weight=Weight.STRONG, group="counters")


def _differences(before: NicPort | None, after: NicPort) -> list[tuple[str, int]]:
    if before is None:
        return []
    return [
        (name, value - before.counters[name])
        for name, value in after.counters.items()
        if _NIC_ERRORS.search(name) and value > before.counters.get(name, value)
    ]


RDMA_LOSS = Hypothesis(
    Card(
        cause="rdma-loss",
        title="RDMA between nodes loses packets or does not come up (GID, NVSHMEM, DeepEP)",
        condition=Condition.STUCK,
        signs=(
            "retransmit, sequence or retry counters of an adapter rise between two looks",
            "ibv, nvshmem or deep_ep in the stack, or their errors in the log; several nodes",
        ),
        vetoes=("one node only",),
        next_test="the counters over 10 s: `grep . /sys/class/infiniband/*/ports/*/hw_counters/* | grep -E "
        "'seq_err|retrans|retries'`; the same command with NCCL_IB_DISABLE=1.",
        remedies=Remedies(
            native="our engine runs on one node and uses no RDMA.",
            vllm="mend the network (flow control, MTU, cable); NCCL_IB_GID_INDEX as `show_gids` has it "
            "after each boot; another `--all2all-backend`; NCCL_IB_DISABLE=1 as a probe only.",
            sglang="mend the network (flow control, MTU, cable); NCCL_IB_GID_INDEX as `show_gids` has it "
            "after each boot; another `--moe-a2a-backend`; NCCL_IB_DISABLE=1 as a probe only.",
        ),
        looks=(Look.STACKS, Look.LOGS, Look.RAS),
        is_recorded=True,
    ),
    _rdma,
)
HYPOTHESES = (BOOTSTRAP_NETWORK, RDMA_LOSS)
