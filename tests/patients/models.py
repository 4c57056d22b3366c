"""The models of the patients: random weights in real files, made once in a folder that Git ignores.

Run as `python -m patients.models FOLDER` (it needs torch, the runner does not). Invariant: a folder is there
only when it is complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patients.patient import HERE, SOURCES

TINY, SHARDED, LARGE = "tiny", "sharded", "large"
_SIZES = {
    TINY: {"max_position": 16384},
    SHARDED: {"hidden_size": 512, "num_layers": 6, "intermediate_size": 1408, "head_size": 128},
    LARGE: {"hidden_size": 1024, "num_layers": 14, "intermediate_size": 2816, "head_size": 256},
}


def provide(folder: Path, *names: str) -> Path:
    """Makes what is missing; the folder."""
    missing = [name for name in names or _SIZES if not (folder / name).is_dir()]
    if missing:
        command = [sys.executable, "-m", "patients.models", str(folder), *missing]
        path = os.pathsep.join((str(SOURCES), str(HERE.parent)))
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    return folder


def _write(folder: Path, name: str) -> None:
    from support.checkpoints import random_weights, tiny_description, write_hf_folder
    from support.serving import write_chat_model

    scratch = folder / f".{name}"
    write_chat_model(scratch, max_position=16384)
    if name != TINY:
        for file in scratch.glob("*.safetensors"):
            file.unlink()
        vocabulary = 262  # of the tokenizer that is there already
        description = tiny_description(
            vocab_size=vocabulary, eos_token_ids=(2,), **{**_SIZES[TINY], **_SIZES[name]}
        )
        write_hf_folder(scratch, description, random_weights(description), num_shards=4)
    scratch.rename(folder / name)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for wanted in sys.argv[2:]:
        _write(place, wanted)
