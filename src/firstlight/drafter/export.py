"""Stage 6: the drafter as folders that engines load: native, vLLM, SGLang, speculators, and what llama.cpp's
converter takes; each is read back.

Weights are the same in every folder; names, layer ids and the config follow the engine. Invariant: a folder
is kept only if our own strict reader makes the same drafter of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from firstlight.base.errors import EngineError
from firstlight.base.files import replacing
from firstlight.drafter.card import CARD, write_card
from firstlight.drafter.checkpoints import load_drafter
from firstlight.drafter.gate_record import forced_gates, passed_gates
from firstlight.drafter.probes import check_probes, write_probes
from firstlight.drafter.shards import read_shard
from firstlight.drafter.stages import MANIFEST, Stage, open_stage, read_manifest, require_target
from firstlight.drafter.target import Target, read_ends
from firstlight.drafter.train import CHECKPOINT
from firstlight.engine.speculation.shipped import TARGET
from firstlight.facts.checkpoint.drafter_config import LAYER_IDS
from firstlight.facts.hf.hf_config_writer import hf_class
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import CONFIG, EMBEDDING, WEIGHTS, load_eagle3, save_eagle3

NATIVE, VLLM, SGLANG, SPECULATORS, GGUF = "native", "vllm", "sglang", "speculators", "gguf"
ENGINES = (NATIVE, VLLM, SGLANG, SPECULATORS, GGUF)
RECIPE = "CONVERT.md"
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
NUM_DRAFTS = 3
# Engines whose EAGLE-3 layer has attention in heads only.
_HEADS_ONLY = (SPECULATORS, GGUF)


def export(out: Path, target: Target, engines: tuple[str, ...] = ENGINES) -> Stage:
    """Writes `out`/export/ENGINE for each engine, with model card and probes, and reads every folder back.

    Nothing for an engine that cannot run it; the manifest says why.
    """
    ends = read_ends(target.checkpoint)
    trained = read_manifest(out / "train")
    require_target(trained, target.record, out / "train")
    drafter, _ = load_drafter(out / "train" / CHECKPOINT, ends.embedding)
    stage = open_stage(out / "export", "export", {}, {}, target.record)
    stage.manifest.inputs = {CHECKPOINT: trained.files[CHECKPOINT]}
    stage.manifest.numbers |= {"forced_gates": forced_gates(out), "unfinished": unfinished(out)}
    captured = out / "capture"
    shard = read_shard(captured / min(read_manifest(captured).files))
    for engine in engines:
        lacks = why_not(engine, drafter)
        if lacks is not None:
            stage.manifest.numbers[engine] = f"not written: {lacks}"
            continue
        folder = stage.folder / engine
        save_eagle3(folder, drafter, torch.bfloat16)
        if engine != NATIVE:
            _rewrite(folder, engine, target, ends.embedding)
        loaded = load_eagle3(folder, target.checkpoint.description, ends.embedding).drafter
        _require_same(folder, drafter, loaded)
        if engine == GGUF:
            write_recipe(folder, drafter)
        write_probes(folder, loaded, shard)
        write_card(folder, out, target, engine)
        with replacing(folder / TARGET) as file:
            file.write(msgspec.json.format(msgspec.json.encode(target.record), indent=1))
        stage.manifest.numbers[engine] = check_probes(folder, target, ends.embedding)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            stage.finish_file(path.relative_to(stage.folder).as_posix())
    stage.finish()
    return stage


def renew_cards(out: Path, target: Target) -> None:
    """Writes the cards of an export, if there is one, anew: some gates come behind it."""
    if not (out / "export" / MANIFEST).exists():
        return
    stage = open_stage(out / "export", "export", {}, {}, target.record)
    stage.manifest.numbers |= {"forced_gates": forced_gates(out), "unfinished": unfinished(out)}
    for engine in ENGINES:
        if (stage.folder / engine / CARD).exists():
            write_card(stage.folder / engine, out, target, engine)
            stage.finish_file(f"{engine}/{CARD}")
    stage.finish()


def unfinished(out: Path) -> str:
    """What speaks against taking the drafter for a finished one; "" if nothing does."""
    trained = read_manifest(out / "train")
    found = []
    if not trained.complete:
        found.append(f"training was stopped at step {trained.numbers.get('step', 0)}, before its end")
    if not passed_gates(out):
        found.append("no gate was gone through (firstlight drafter check, or run)")
    return "; ".join(found)


def why_not(engine: str, drafter: Eagle3Drafter) -> str | None:
    """Why an engine cannot run a drafter of this kind, as the end of a sentence; None if it can."""
    latent = drafter.config.latent
    if latent is not None and engine in _HEADS_ONLY:
        return f"its attention is latent, and {engine} knows drafters with attention in heads only"
    if latent is not None and latent.query_rank is None and engine == SGLANG:
        return "SGLang's latent attention of drafters takes queries of low rank only"
    return None


def _rewrite(folder: Path, engine: str, target: Target, embedding: torch.Tensor) -> None:
    config = json.loads((folder / CONFIG).read_text())
    tensors = read_tensor_file(folder / WEIGHTS)
    _DIALECTS[engine](config, tensors, target, embedding)
    write_tensor_file(folder / WEIGHTS, tensors, {})
    with replacing(folder / CONFIG) as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")


def _for_vllm(config: Config, tensors: Tensors, target: Target, embedding: torch.Tensor) -> None:
    """Ids of blocks that have run, where either of vLLM's two places finds them.

    Its latent attention takes the rope section alone, so the base stands in there, too.
    """
    config["eagle_config"] = {LAYER_IDS: config[LAYER_IDS]}
    if config["rope_scaling"] is not None:
        config["rope_scaling"] |= {"rope_theta": config["rope_theta"]}


def _for_sglang(config: Config, tensors: Tensors, target: Target, embedding: torch.Tensor) -> None:
    """Ids of blocks whose output is taken: one less."""
    config["eagle_config"] = {LAYER_IDS: [layer - 1 for layer in config.pop(LAYER_IDS)]}


def _for_speculators(config: Config, tensors: Tensors, target: Target, embedding: torch.Tensor) -> None:
    """Nested sizes, other names, the target's embedding in the file, and every flag said."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)
    tensors[EMBEDDING] = embedding.to(torch.bfloat16)
    inner = dict(config)
    own = {name: inner.pop(name) for name in ("draft_vocab_size", LAYER_IDS)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}
    config.clear()
    config.update(
        own,
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        speculators_config={
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.record.name, "architectures": _architectures(target)},
        },
        norm_before_residual=False,
        transformer_layer_config=inner,
        torch_dtype="bfloat16",
    )


def _for_gguf(config: Config, tensors: Tensors, target: Target, embedding: torch.Tensor) -> None:
    """llama.cpp's converter reads the raw dialect, with the ids at the top level and nowhere else."""
    config["tie_word_embeddings"] = False


def _architectures(target: Target) -> list[str]:
    """The target's class, as its publisher names it."""
    file = target.path / CONFIG
    named = json.loads(file.read_text()).get("architectures") if file.is_file() else None
    return named or [hf_class(target.checkpoint.description)]


def write_recipe(folder: Path, drafter: Eagle3Drafter) -> None:
    """The commands that make a GGUF file, or why llama.cpp cannot run it."""
    config = drafter.config
    lacks = [name for name in ("fc_norm", "norm_output") if getattr(config, name)]
    if len(config.state_layers) != 3:
        lacks.append(f"{len(config.state_layers)} states")
    text = RECIPE_TEXT
    if lacks:
        text = (
            f"llama.cpp does not run this drafter: it has {', '.join(lacks)}, and 3 states alone are known.\n"
        )
    with replacing(folder / RECIPE) as file:
        file.write(text.encode())


RECIPE_TEXT = """# To a GGUF file for llama.cpp

With a checkout of llama.cpp that knows EAGLE-3, and the target as a Hugging Face folder (its tokenizer is
taken from there):

    python convert_hf_to_gguf.py THIS_FOLDER --target-model-dir TARGET_FOLDER \\
        --outtype bf16 --outfile drafter.gguf
    llama-server -m TARGET.gguf -md drafter.gguf --spec-type draft-eagle3 --spec-draft-n-max 3

What the converter looks at was checked when this folder was written: one layer, `draft_vocab_size`, three
ids in `eagle_aux_hidden_state_layer_ids` at the top level (blocks that have run), `d2t` in range and without
doubles, no norm that llama.cpp does not know.
"""

_Edit = Callable[[Config, Tensors, Target, torch.Tensor], None]
_DIALECTS: dict[str, _Edit] = {
    VLLM: _for_vllm,
    SGLANG: _for_sglang,
    SPECULATORS: _for_speculators,
    GGUF: _for_gguf,
}


def _require_same(folder: Path, drafter: Eagle3Drafter, loaded: Eagle3Drafter) -> None:
    """Raises `EngineError` where our reader makes another drafter of the folder: a bug of the export."""
    same = loaded.config == drafter.config and loaded.target_ids_R.equal(drafter.target_ids_R)
    for (_, ours), (_, theirs) in zip(drafter.named_parameters(), loaded.named_parameters(), strict=True):
        same = same and theirs.equal(ours.to(torch.bfloat16).to(theirs.dtype))
    if not same:
        raise EngineError(
            f"{folder} does not say the same as the drafter it was made from.",
            "This is a bug; please report it.",
        )
