"""What a process is, told from its title, its arguments, and as a last resort its 15 letters of name.

Pure. Titles are kept as they are after a process set its own; `comm` is cut by the kernel and is all that is
left of a zombie. Invariant: a guess is never made from a user's file names, only from what the engines call
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from firstlight.doctor.case.target import Engine, Role

# "VLLM::Worker_PP0_TP1", "sglang::scheduler_DP1_TP0_EP0"
_TITLE = re.compile(r"^(VLLM|sglang)::([A-Za-z]+(?:_[a-z]+)*)((?:_[A-Z]+_?\d+|_\d+)*)")
_LABEL = re.compile(r"_([A-Z]+)_?(\d+)")
_ROLES = {
    "apiserver": Role.API,
    "enginecore": Role.ENGINE,
    "worker": Role.RANK,
    "coordinator": Role.HELPER,
    "dpcoordinator": Role.HELPER,
    "scheduler": Role.RANK,
    "detokenizer": Role.DETOKENIZER,
    "data_parallel_controller": Role.ENGINE,
    "tokenizer_worker": Role.API,
}
_LONGEST_COMM = 15
_INTERPRETER = re.compile(r"^(python|pypy)[\d.]*[a-z]?$", re.IGNORECASE)
_INTERPRETER_VALUES = frozenset(("-W", "-X", "--check-hash-based-pycs"))
COMPILERS = frozenset(
    ("ninja", "nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "hipcc")
    + ("cc1", "cc1plus", "cc", "c++", "g++", "gcc", "clang", "clang++")
    + ("as", "ld", "ld.bfd", "ld.gold", "ld.lld", "collect2")
)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says it is. `labels` are its places in the groups: {"TP": 1, "PP": 0}."""

    engine: Engine
    role: Role
    labels: dict[str, int] = {}


def identify(command: Sequence[str], comm: str) -> Identity | None:
    """The identity of a process, or None when it is none of a model server's by its own words."""
    if command:
        titled = _from_title(command[0])
        return titled or _native(command) or _foreign_launcher(command) or _compiler(command[0])
    return _from_title(comm) or _from_cut_title(comm) or _compiler(comm)


def _from_title(title: str) -> Identity | None:
    match = _TITLE.match(title)
    if match is None:
        return None
    engine = Engine.VLLM if match[1] == "VLLM" else Engine.SGLANG
    role = _ROLES.get(match[2].lower())
    if role is None:
        return _from_cut_title(title) or Identity(engine=engine, role=Role.HELPER)
    return Identity(engine=engine, role=role, labels={name: int(n) for name, n in _LABEL.findall(match[3])})


def _from_cut_title(comm: str) -> Identity | None:
    """`sglang::schedul` is a scheduler; which one is lost."""
    prefix, colons, rest = comm.partition("::")
    if not colons or prefix not in ("VLLM", "sglang") or len(comm) < _LONGEST_COMM:
        return None
    engine = Engine.VLLM if prefix == "VLLM" else Engine.SGLANG
    word = re.sub(r"_[A-Z]*\d*$", "", rest).lower()
    roles = [role for name, role in _ROLES.items() if name.startswith(word)]
    return Identity(engine=engine, role=roles[0] if roles else Role.HELPER)


def _native(command: Sequence[str]) -> Identity | None:
    module = _module(command)
    if module == "firstlight.engine.rank":
        rank = option(command, ("--rank",))
        labels = {"RANK": int(rank)} if rank is not None and rank.isdigit() else {}
        return Identity(engine=Engine.NATIVE, role=Role.RANK, labels=labels)
    if module == "firstlight.serve.api":
        return Identity(engine=Engine.NATIVE, role=Role.API)
    # Whose server it is these do not know: a foreign engine has them too.
    if module == "firstlight.serve.relay":
        return Identity(engine=Engine.UNKNOWN, role=Role.API)
    if any(word.endswith("firstlight/launch/janitor.py") for word in _program_words(command)[:1]):
        return Identity(engine=Engine.UNKNOWN, role=Role.JANITOR)
    if _runs(command, "firstlight", "serve"):
        return Identity(engine=_backend(command), role=Role.SUPERVISOR)
    return None


def _backend(command: Sequence[str]) -> Engine:
    ours = list(command)[: list(command).index("--")] if "--" in command else command
    name = option(ours, ("--backend",))
    return {"vllm": Engine.VLLM, "sglang": Engine.SGLANG}.get(name or "", Engine.NATIVE)


def _foreign_launcher(command: Sequence[str]) -> Identity | None:
    module = _module(command) or ""
    if module.startswith("vllm.entrypoints") or _runs(command, "vllm", "serve"):
        return Identity(engine=Engine.VLLM, role=Role.API)
    if module == "sglang.launch_server" or _runs(command, "sglang", "serve"):
        return Identity(engine=Engine.SGLANG, role=Role.API)
    return None


def _compiler(program: str) -> Identity | None:
    name = PurePosixPath(program).name
    return Identity(engine=Engine.UNKNOWN, role=Role.COMPILER) if is_compiler(name) else None


def is_compiler(name: str) -> bool:
    """Whether a program of this name compiles or links, version suffixes aside (`g++-12`)."""
    return re.sub(r"-\d+(\.\d+)*$", "", name.removeprefix("x86_64-linux-gnu-")) in COMPILERS


def is_helper(command: Sequence[str]) -> bool:
    """Python's own trackers: they only wait, and mean nothing."""
    text = " ".join(command)
    return "multiprocessing.resource_tracker" in text or "multiprocessing.forkserver" in text


def is_spawned(command: Sequence[str]) -> bool:
    """A child of Python's multiprocessing that has not given itself a title yet."""
    return any("multiprocessing.spawn" in argument for argument in command)


def option(command: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of an option, as `--name value` or `--name=value`; the last one counts, as for argparse."""
    value = None
    for position, argument in enumerate(command):
        name, equals, after = argument.partition("=")
        if name.replace("_", "-") not in names:
            continue
        if equals:
            value = after
        elif position + 1 < len(command):
            value = command[position + 1]
    return value


def _module(command: Sequence[str]) -> str | None:
    """What stands after `python … -m`."""
    words = _program_words(command)
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else None


def _runs(command: Sequence[str], program: str, subcommand: str) -> bool:
    """`program subcommand`, `python /path/program subcommand` or `python -m program subcommand`.

    Only a process that is the program itself: one that starts it (`timeout 60 vllm serve`, tmux, a launcher
    in Python) or speaks of it (`ssh box vllm serve`) has the same words further back.
    """
    words = _program_words(command)
    if words[:1] == ["-m"]:
        is_program, rest = words[1:2] == [program], words[2:]
    else:
        is_program, rest = bool(words) and PurePosixPath(words[0]).name == program, words[1:]
    return is_program and subcommand in rest[:3]


def _program_words(command: Sequence[str]) -> list[str]:
    """What is run, and its arguments: without the interpreter and its own options, but with its `-m`."""
    words = list(command)
    if not words or not _INTERPRETER.match(PurePosixPath(words[0]).name):
        return words
    words.pop(0)
    while words and words[0].startswith("-"):
        letters = words[0][1:]
        if letters.startswith("-") or words[0] in _INTERPRETER_VALUES:
            del words[: 1 + (words[0] in _INTERPRETER_VALUES)]
        elif letters.endswith("m"):  # `-m`, and `-um`
            return ["-m", *words[1:]]
        elif letters.endswith("c"):  # a text, not a program
            return []
        else:
            words.pop(0)
    return words
