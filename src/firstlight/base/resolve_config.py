"""From what the user gave (flags, a TOML file) and what the machine has to config sections, with reasons.

Pure but for `read_toml`: the same input gives the same sections. Invariant: a flag beats the file, the file
beats the default, and every value that is not a default has a reason that names its source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from firstlight.base.config import (
    GIVES_WAY,
    MIN_MODEL_LEN,
    EngineSection,
    LaunchSection,
    ModelSection,
    ServerSection,
)
from firstlight.base.disposable_child import require_answer
from firstlight.base.draft_profile import parse_profile
from firstlight.base.draft_tree import check_drafter, check_tree
from firstlight.base.errors import UsageError, why_unreadable
from firstlight.base.settings import ALL_SETTINGS, SECTIONS, Setting

# Keys of a TOML file that are not fields of a section, and the table they may stand in.
OTHER_KEYS = {
    "model": "model",
    "api-key": "server",
    "api-key-file": "server",
    "debug": "server",
    "backend-args": "launch",
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?)(?:I?B)?")
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Reason(msgspec.Struct, frozen=True):
    """Why a setting has its value: shown by `firstlight env`, and at start if it `is_doubtful`."""

    name: str
    value: object
    why: str
    is_doubtful: bool = False


class Given(msgspec.Struct, frozen=True):
    """Values by setting name from one source. `origin` names the source in messages: "the flags"."""

    values: Mapping[str, Any]
    origin: str


class Resolved(msgspec.Struct, frozen=True):
    """The sections of a run before the model was located: `model.path` is still empty.

    `given`: the names of the settings that a person gave.
    """

    model: ModelSection
    engine: EngineSection
    server: ServerSection
    launch: LaunchSection
    reasons: tuple[Reason, ...]
    given: frozenset[str] = frozenset()


def read_toml(path: Path) -> Given:
    """The settings in a TOML file: flat keys, or in tables named after the sections."""
    require_answer(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the config file {path}: {why_unreadable(error)}.",
            "Give a TOML file in UTF-8 with --config.",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", 'Write lines such as port = 9000 or model = "model.gguf".'
        ) from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            values.update(_table(path, key, value))
        else:
            _known_or_raise(key, str(path))
            values[key] = value
    return Given(values, str(path))


def resolve(sources: Sequence[Given], cores: int) -> Resolved:
    """The sections from `sources`, the strongest first, on a machine where we may use `cores` cores."""
    fields: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    reasons: dict[str, Reason] = {}
    for setting in ALL_SETTINGS:
        for source in sources:
            if source.values.get(setting.name) is not None:
                value = _checked(setting, source.values[setting.name], source.origin)
                fields[setting.section][setting.field] = value
                reasons[setting.name] = Reason(setting.name, value, f"given in {source.origin}")
                break
    fields["model"].setdefault("served_names", ())
    given = frozenset(reasons)
    server = ServerSection(**fields["server"])
    _check_server(server, set(reasons))
    engine, reasons["threads"] = _with_threads(_engine(fields["engine"]), cores)
    check_engine(engine)
    model = ModelSection(path="", **fields["model"])
    launch = LaunchSection(**fields["launch"])
    if launch.backend == "native" and engine.drafter is not None:
        check_drafter(engine.drafter)
    return Resolved(model, engine, server, launch, tuple(reasons.values()), given)


def located(model: ModelSection, asked: str | None, path: Path, default_name: str) -> ModelSection:
    """`model` with the local `path` that `asked` led to, and a served name if none was given.

    What was not asked for by name is served as `default_name`; a file under its name without ".gguf", a
    folder under its name, a hub id under the id.
    """
    names = model.served_names or (_served_name(asked, path) if asked is not None else default_name,)
    return msgspec.structs.replace(model, path=str(path), served_names=names)


def _served_name(asked: str, path: Path) -> str:
    is_hub_id = asked.count("/") == 1 and not asked.startswith((".", "/", "~"))
    if is_hub_id and not path.as_posix().endswith(Path(asked).as_posix()):
        return asked
    return path.name.removesuffix(".gguf")


def engine_from(options: Mapping[str, Any], origin: str) -> EngineSection:
    """An engine section of options by their field names, as checked as if they came from a file.

    None leaves an option at its default. Raises `UsageError`s that name `origin`.
    """
    settings = {setting.field: setting for setting in ALL_SETTINGS if setting.section == "engine"}
    unknown = next((name for name in options if name not in settings), None)
    if unknown is not None:
        raise UsageError(f"{origin} takes no option {unknown!r}.", _suggestion(unknown, list(settings)))
    given = {name: value for name, value in options.items() if value is not None}
    section = _engine({name: _checked(settings[name], value, origin) for name, value in given.items()})
    check_engine(section)
    return section


def _engine(given: Mapping[str, Any]) -> EngineSection:
    return EngineSection(**given, shrinks=tuple(name for name in GIVES_WAY if name not in given))


def parse_size(text: str | int) -> int:
    """Bytes from 1048576, "512M", "2G" or "2GiB"; raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    number, unit = match.groups()
    return int(float(number) * _SIZE_UNITS[unit])


def _table(path: Path, section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    if section not in SECTIONS:
        raise UsageError(f"{path} has an unknown table [{section}].", f"Use one of {', '.join(SECTIONS)}.")
    allowed = [setting.name for setting in ALL_SETTINGS if setting.section == section]
    allowed += [key for key, home in OTHER_KEYS.items() if home == section]
    for key in table:
        if key not in allowed:
            raise UsageError(f"[{section}] in {path} has an unknown key {key!r}.", _suggestion(key, allowed))
    return dict(table)


def _known_or_raise(key: str, origin: str) -> None:
    names = [setting.name for setting in ALL_SETTINGS] + [*OTHER_KEYS]
    if key not in names:
        raise UsageError(f"{origin} has an unknown key {key!r}.", _suggestion(key, names))


def _suggestion(key: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    close = close or difflib.get_close_matches(key.replace("_", "-"), names, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"The keys are: {', '.join(names)}."


def _checked(setting: Setting, value: Any, origin: str) -> Any:
    """`value` in the field's type and within its limits, or a `UsageError` that names the source."""

    def wrong(must: str, instead: str) -> UsageError:
        what_to_do = f"Give {instead}. {setting.name} is: {setting.help}"
        return UsageError(f"{setting.name} in {origin} is {value!r}, but must {must}.", what_to_do)

    if setting.repeats and isinstance(value, str):
        value = [value]
    try:
        typed = parse_size(value) if setting.is_size else msgspec.convert(value, setting.type)
    except (msgspec.ValidationError, ValueError) as error:
        raise wrong(f"be {_expected(setting)}", "one") from error
    if any(text == "" for text in (typed if isinstance(typed, list | tuple) else [typed])):
        raise wrong("not be empty", "a value, or leave it out")
    if setting.choices and typed not in setting.choices:
        raise wrong(f"be one of {', '.join(setting.choices)}", "one of these")
    if setting.minimum is not None and not typed >= setting.minimum:  # written so that NaN fails
        raise wrong(f"be at least {setting.minimum:g}", f"{setting.minimum:g} or more")
    if setting.maximum is not None and not typed <= setting.maximum:
        raise wrong(f"be at most {setting.maximum:g}", f"{setting.maximum:g} or less")
    return typed


def _expected(setting: Setting) -> str:
    if setting.is_size:
        return "a size, such as 512M or 2G"
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    return kinds.get(setting.type, "text")


def _check_server(server: ServerSection, given: set[str]) -> None:
    if (server.tls_cert is None) != (server.tls_key is None):
        raise UsageError("HTTPS needs both --tls-cert and --tls-key.", "Give both, or neither.")
    if server.uds is not None and given & {"host", "port"}:
        raise UsageError("--uds listens on a Unix socket; --host and --port do not apply.", "Give one kind.")


def check_engine(engine: EngineSection) -> None:
    """Raises a `UsageError` for sizes that no model can run with."""
    if 0 < engine.max_model_len < MIN_MODEL_LEN:
        raise UsageError(
            f"--max-model-len {engine.max_model_len} is too short: the self-test at start has a prompt of "
            f"{MIN_MODEL_LEN - 1} tokens and makes one.",
            f"Use {MIN_MODEL_LEN} or more, or leave it out.",
        )
    if engine.draft_acceptance is not None:
        parse_profile(engine.draft_acceptance)
        if engine.drafter is None:
            raise UsageError("--draft-acceptance accepts drafts, but nothing drafts.", "Add --drafter ngram.")
    check_tree(engine)
    if engine.max_batched_tokens < engine.max_num_seqs:
        raise UsageError(
            f"--max-batched-tokens {engine.max_batched_tokens} is less than --max-num-seqs "
            f"{engine.max_num_seqs}: each running sequence needs a token in every step.",
            f"Add --max-num-seqs {engine.max_batched_tokens}, or raise --max-batched-tokens.",
        )


def _with_threads(engine: EngineSection, cores: int) -> tuple[EngineSection, Reason]:
    """The engine section with its threads settled: nothing is oversubscribed unless it was asked for."""
    ranks = engine.tensor_parallel
    if engine.threads:
        why = f"given; {ranks} rank(s) of {engine.threads} on {cores} core(s)"
        is_too_many = engine.threads * ranks > cores
        if is_too_many:
            why += ": more threads than cores, which is slower than fewer"
        return engine, Reason("threads", engine.threads, why, is_too_many)
    threads = max(1, cores // ranks)
    why = f"{cores} core(s) divided by {ranks} rank(s)"
    if ranks > cores:
        why += ": more ranks than cores, which is slower than fewer"
    return msgspec.structs.replace(engine, threads=threads), Reason("threads", threads, why, ranks > cores)
