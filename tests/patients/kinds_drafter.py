"""Patients whose drafter is missing, or is of the wrong kind.

Listed by `kinds`. Invariant: the server is otherwise well: without the drafter it serves, and with it what it
says of itself is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from patients.foreign_servers import Foreign
from patients.models import TINY
from patients.native import Ranks
from patients.patient import Kind, Patient, Ward, until

_MISMATCH = frozenset({"drafter-mismatch"})
_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 262,
    "draft_vocab_size": 100,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def _folder(ward: Ward, config: dict[str, object]) -> Path:
    folder = ward.folder / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _files_missing(ward: Ward) -> Patient:
    """A download that brought one file only; the rank fails at it, and nobody is there to say so."""
    folder = _folder(ward, _CONFIG)
    lost = ward.random.choice(["model.safetensors", "config.json"])
    if lost == "config.json":
        (folder / lost).rename(folder / "README.md")
    ranks = Ranks(ward, ward.models / TINY, section={"drafter": str(folder)})
    ranks.processes[0].wait(120)
    return ranks.patient(f"{lost} is missing")


def _wrong_kind(ward: Ward) -> Patient:
    """EAGLE for an EAGLE-3 drafter: fc is left out without a word, and no draft is ever accepted."""
    folder = _folder(ward, _CONFIG)
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(folder))
    server = Foreign(ward, "sglang", ward.models / TINY, 1, {"drafts": "fc left out"}, flags=flags).ready()
    for _ in range(4):
        server.ask(ward.random.randrange(8, 24))
    until(lambda: server.said().count("accept len: 1.00") >= 4, "four batches", every_s=0.05)
    return server.patient()


KINDS = (
    Kind(
        name="drafter-files-missing",
        is_quick=True,
        what="our rank is given a drafter whose weights or configuration are missing",
        start=_files_missing,
        causes=_MISMATCH,
        conditions=frozenset({"dead"}),
    ),
    Kind(
        name="drafter-wrong-kind",
        is_quick=True,
        what="a foreign server runs an EAGLE-3 drafter as EAGLE: acceptance length exactly 1.00",
        start=_wrong_kind,
        causes=_MISMATCH,
        conditions=frozenset({"slow"}),
    ),
)
