"""Every engine in every setting in which it is measured: its command, and what is to be known of it. Pure.

Used by `rounds` and `page`. Invariant: all settings have the same threads, the same number of sequences and
the same number of tokens in the KV cache; each keeps its own default type of the KV.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from peers.measures import KV_TOKENS, MAX_MODEL_LEN, MAX_SEQUENCES

OURS, LLAMA, OPENVINO, VLLM, TRANSFORMERS = "firstlight", "llama.cpp", "openvino", "vllm", "transformers"
PEERS = (OURS, LLAMA, OPENVINO, VLLM, TRANSFORMERS)
NAME = "model"  # what each server calls it
_DRIVERS = Path(__file__).with_name("drivers")
_VLLM_BLOCK = 128
# 30 layers, 3 heads of 64 keys and as many values; a row of 64 takes 2 bytes a value, or 72 bytes as int8.
_KV_TOKEN_BYTES = {"float16": 30 * 3 * 2 * 128, "int8": 30 * 3 * 2 * 72}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`command` starts an HTTP server, or where `is_driver` a process that speaks JSON lines.

    `stays`: it is launched once in a run and stopped by a signal (SIGSTOP) between its visits.
    """

    peer: str
    variant: str
    command: tuple[str, ...]
    note: str
    variables: dict[str, str] = field(default_factory=dict)
    is_driver: bool = False
    stays: bool = False
    every: int = 1  # visited in every round, or in each second one, …

    @property
    def name(self) -> str:
        return f"{self.peer} {self.variant}".strip()


@dataclass(frozen=True)
class Places:
    """Where the peers lie; `folder` is outside git. `gguf` is the model, `model` its Hugging Face folder."""

    folder: Path
    vllm: Path
    gguf: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def llama_server(self) -> Path:
        return self.folder / "llama.cpp" / "build" / "bin" / "llama-server"

    def llama_model(self, variant: str) -> Path:
        """The model of a variant; the one of Q4_1 is the file itself."""
        return self.gguf if variant == "Q4_1" else self.folder / "llama.cpp" / f"{variant}.gguf"

    @property
    def openvino_python(self) -> Path:
        return self.folder / "openvino" / "venv" / "bin" / "python"

    def openvino_model(self, weights: str) -> Path:
        return self.gguf if weights == "gguf" else self.folder / "openvino" / weights


def settings(places: Places, threads: int) -> tuple[Setting, ...]:
    """All, in the order of a round."""
    return (
        *(_ours(places, threads, kv) for kv in ("float16", "int8")),
        *(_llama(places, threads, variant) for variant in ("Q4_0", "Q4_1", "Q8_0", "BF16")),
        *(
            _openvino(places, threads, weights, hint)
            for weights, hint in (("int8", "f32"), ("int4", "f32"), ("gguf", "f32"), ("int4", "bf16"))
        ),
        *(_vllm(places, threads, how) for how in ("eager", "compiled")),
        _transformers(places, threads),
    )


def _ours(places: Places, threads: int, kv: str) -> Setting:
    flags = f"--cpu-kernels auto --threads {threads} --max-num-seqs {MAX_SEQUENCES} --served-name {NAME}"
    sizes = f"--max-model-len {MAX_MODEL_LEN} --kv-dtype {kv} --kv-memory {KV_TOKENS * _KV_TOKEN_BYTES[kv]}"
    command = (sys.executable, "-P", "-m", "firstlight", "serve", str(places.gguf))
    return Setting(
        peer=OURS,
        variant="" if kv == "float16" else f"{kv} KV",
        command=(*command, *flags.split(), *sizes.split()),
        note=f"the Q4_1 file itself, KV in {kv}",
    )


def _llama(places: Places, threads: int, variant: str) -> Setting:
    sizes = f"-t {threads} -tb {threads} -c {KV_TOKENS} -np {MAX_SEQUENCES} --kv-unified --cache-ram 0"
    command = (str(places.llama_server), "-m", str(places.llama_model(variant)), "--alias", NAME)
    made = "the file itself" if variant == "Q4_1" else "requantised from that file by its own llama-quantize"
    return Setting(
        peer=LLAMA,
        variant=variant,
        command=(*command, *sizes.split(), "--no-webui"),
        note=f"{made}, KV in float16",
    )


def _openvino(places: Places, threads: int, weights: str, hint: str) -> Setting:
    driver = str(_DRIVERS / "openvino_lines.py")
    model = str(places.openvino_model(weights))
    sizes = (str(threads), str(KV_TOKENS), str(MAX_SEQUENCES))
    made = {
        "gguf": "the file itself, by its own reader",
        "int8": "8 bits, by optimum-intel from the folder",
        "int4": "4 bits in groups of 64, by optimum-intel from the folder",
    }
    return Setting(
        peer=OPENVINO,
        variant=f"{weights} {hint}",
        command=(str(places.openvino_python), driver, model, str(places.model), hint, *sizes),
        note=f"in process; {made[weights]}; inference precision {hint}, KV in its default type (8 bits)",
        is_driver=True,
    )


def _vllm(places: Places, threads: int, how: str) -> Setting:
    sizes = f"--max-model-len {MAX_MODEL_LEN} --max-num-seqs {MAX_SEQUENCES} --block-size {_VLLM_BLOCK}"
    blocks = f"--num-gpu-blocks-override {KV_TOKENS // _VLLM_BLOCK} --no-enable-log-requests"
    command = (str(places.vllm / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server")
    return Setting(
        peer=VLLM,
        variant=how,
        command=(
            *command,
            "--model",
            str(places.model),
            "--served-model-name",
            NAME,
            *sizes.split(),
            *blocks.split(),
            *(("--enforce-eager",) if how == "eager" else ()),
        ),
        variables={"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"},
        note=f"bfloat16, all cores bound, {how}; launched once, stopped by SIGSTOP between its visits",
        stays=True,
    )


def _transformers(places: Places, threads: int) -> Setting:
    driver = str(_DRIVERS / "transformers_lines.py")
    return Setting(
        peer=TRANSFORMERS,
        variant="",
        command=(sys.executable, driver, str(places.model), str(threads)),
        note="generate() in process, dynamic cache, bfloat16 where the processor has it, else float32",
        is_driver=True,
        every=2,
    )
