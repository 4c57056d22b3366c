"""How `firstlight chat` samples where its user names nothing: the model's own way, or what local tools do.

The protocol's default is a temperature of 1, with which small models talk nonsense. A server of ours says
what the model's files say; of any other, a folder that lies on this machine is read. Invariant: what the user
gives wins, and what is taken is told with where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_CUTS = ("top_p", "top_k", "min_p")
# What the makers' cards sample with, for models whose files do not say it: words of a name, and the setting.
_CARDS: dict[tuple[str, ...], dict[str, float]] = {
    ("smollm2", "instruct"): {"temperature": 0.2, "top_p": 0.9},
}
_LOCAL_TOOLS = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's; Ollama's are like them
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Known:
    """What is known of the model: names of it, and sampling defaults of its files.

    `is_ours`: the server applies those by itself, and knows `min_p`, which OpenAI's protocol does not.
    """

    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] | None = None
    is_ours: bool = False


@dataclass(frozen=True)
class Sampling:
    """`fields` go into each request; `words` say how is sampled, and whose choice that is."""

    fields: dict[str, Any]
    words: str


def choose_sampling(known: Known, given: Mapping[str, Any]) -> Sampling:
    """The sampling of a conversation. `given`: the user's, without what was left out."""
    mine = {name: given[name] for name in _FIELDS if name in given}
    if mine.get("temperature") == 0:
        return Sampling(mine, "greedily, as asked")
    theirs = {name: value for name in _FIELDS if _is_number(value := (known.defaults or {}).get(name))}
    if "temperature" in theirs:
        return _joined(theirs, mine, "as the model's generation_config says")
    name = " ".join(known.names).lower()
    card = next((card for words, card in _CARDS.items() if all(word in name for word in words)), None)
    if card is not None:
        return _joined({**theirs, **card}, mine, "as the model's card says")
    tools: dict[str, float] = {"temperature": _LOCAL_TOOLS["temperature"]}
    if not any(cut in theirs or cut in mine for cut in _CUTS):
        cuts = _CUTS if known.is_ours else ("top_p",)
        tools |= {cut: _LOCAL_TOOLS[cut] for cut in cuts if cut in _LOCAL_TOOLS}
    return _joined({**theirs, **tools}, mine, "the model names nothing; as local tools do")


def read_folder(root: str) -> dict[str, Any] | None:
    """The sampling defaults of a model's folder on this machine; None where there is none to be read."""
    path = Path(root) / "generation_config.json"
    try:
        if not path.is_absolute() or path.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("do_sample") is not False else None


def _joined(theirs: Mapping[str, Any], mine: Mapping[str, Any], why: str) -> Sampling:
    fields = {name: mine.get(name, theirs.get(name)) for name in _FIELDS if name in theirs or name in mine}
    said = ", ".join(f"{name} {fields[name]:g}{' (given)' if name in mine else ''}" for name in fields)
    return Sampling(fields, f"with {said}" + ("" if fields.keys() == mine.keys() else f" ({why})"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
