"""What the server says of itself: models, health, figures, configuration.

Invariant: nothing here is a secret, and nothing here waits for the engine.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

import firstlight
from firstlight.engine.messages import EngineStats
from firstlight.engine.speculation.metrics import figures
from firstlight.serve.openai import replies
from firstlight.serve.parsing.parser import ParserFamily
from firstlight.serve.server import Server


def models(server: Server) -> replies.ModelList:
    """Every name of the served model."""
    return replies.ModelList([_model(server, name) for name in server.config.model.served_names])


def model(server: Server, name: str) -> replies.Model:
    """One model by its name; a 404 for others."""
    return _model(server, server.check_model(name))


def _model(server: Server, name: str) -> replies.Model:
    root = server.config.model.path
    return replies.Model(name, server.started_unix_s, "firstlight", root, server.ready.max_model_len)


def tokenizer_info(server: Server) -> replies.TokenizerInfo:
    """The tokenizer by the class that transformers reads any tokenizer.json with."""
    text, specials = server.text, server.text.special_tokens
    return replies.TokenizerInfo(
        "PreTrainedTokenizerFast",
        specials.get("bos_token"),
        specials.get("eos_token"),
        text.chat_template,
        text.vocab_size,
        server.ready.max_model_len,
    )


def server_info(server: Server) -> dict[str, Any]:
    """Version, configuration as it was resolved, the engine's start-up report, and where it is now."""
    config = msgspec.to_builtins(server.config)
    del config["run_dir"]
    return {
        "version": firstlight.__version__,
        "uptime_s": round(time.time() - server.started_unix_s, 1),
        "config": config,
        "generation_defaults": dict(server.generation_defaults),
        "max_model_len": server.ready.max_model_len,
        "vocab_size": server.ready.vocab_size,
        "has_chat_template": server.text.has_chat_template,
        "parsers": {"tool_calls": _name(server.parsers.tools), "reasoning": _name(server.parsers.reasoning)},
        "startup_report": server.ready.report,
        "engine": _stats(server.client.stats),
    }


def _name(family: ParserFamily | None) -> str | None:
    return None if family is None else family.name


def _stats(stats: EngineStats) -> dict[str, Any]:
    """By name; the drafts with the figures that follow from their counts."""
    values = msgspec.structs.asdict(stats)
    values["drafts"] = None if stats.drafts is None else figures(stats.drafts)
    return values
