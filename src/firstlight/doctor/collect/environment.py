"""The variables and libraries of a process that explain how it behaves.

Invariant: of a variable that may be a secret only the name is kept; of all others only those on the list.
"""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path

from firstlight.doctor.case.redact import hide_in_text, is_secret_name
from firstlight.doctor.case.target import TargetProcess
from firstlight.doctor.case.values import Value
from firstlight.doctor.case.values_process import Environment, Libraries, Library
from firstlight.doctor.collect.scene import Collector, each_process
from firstlight.doctor.servers.procfs import ProcFs

_PREFIXES = (
    ("CUDA_", "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "GLOO_", "VLLM_")
    + ("SGL_", "SGLANG_", "FLASHINFER_", "TRITON_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_")
    + ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "FIRSTLIGHT_", "RAY_")
    + ("NVSHMEM_", "UCX_", "NVIDIA_", "HIP_", "ROCR_", "DG_", "TVM_")
    + ("TILELANG_", "PYTHON", "MAX_JOBS", "MASTER_", "SAFETENSORS_", "SLURM_", "DEEP_GEMM")
)
_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOME", "TMPDIR", "PATH", "LD_LIBRARY_PATH")
    + (
        "LD_PRELOAD",
        "LANG",
        "TZ",
        "container",
        "KUBERNETES_SERVICE_HOST",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
    )
)
_PROXIES = frozenset(("http_proxy", "https_proxy", "all_proxy", "no_proxy"))
_LIBRARY = re.compile(
    r"nccl|torch|cuda|nvrtc|ptxjit|nvshmem|cublas|cudnn|vgpu|flashinfer|gloo|libuv|gomp|iomp|mkl|vllm|sgl|numa"
    r"|ibverbs|rccl|hip|_C\b"
)
_BUILD_MATTERS = re.compile(r"lib(?:nccl|rccl|torch|torch_cuda|torch_cpu|nvshmem\w*|cuda)\.so")
MAX_LIBRARIES = 200
_MAGIC, _64_BIT, _LITTLE = b"\x7fELF", 2, 1
_NOTE, _BUILD_ID = 4, 3
_ENTRY = struct.Struct("<IIQQQQQQ")  # type, flags, offset, address, physical, size, size in memory, alignment
_MAX_NOTES_BYTES = 64 * 1024


def _environment(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    shown: dict[str, str] = {}
    hidden: list[str] = []
    for name, text in procfs.environ(process.pid).items():
        if is_secret_name(name):
            hidden.append(name)
        elif name in _NAMES or name.lower() in _PROXIES or name.startswith(_PREFIXES):
            shown[name] = hide_in_text(text)[:500]
    value = Environment(variables=dict(sorted(shown.items())), hidden=tuple(sorted(hidden)))
    return str(procfs.path(process.pid, "environ")), value


def _libraries(procfs: ProcFs, process: TargetProcess) -> tuple[str, Value]:
    """The libraries in the maps, each once."""
    found: dict[str, Library] = {}
    for line in procfs.text(process.pid, "maps").splitlines():
        words = line.split(None, 5)
        path = words[5] if len(words) == 6 and words[5].startswith("/") else ""
        name = path.removesuffix(" (deleted)").rpartition("/")[2]
        if ".so" in name and path not in found and _LIBRARY.search(name):
            is_deleted = path.endswith(" (deleted)")
            path = path.removesuffix(" (deleted)")
            mine = "" if is_deleted else _build_id(procfs, process.pid, name, path)
            found[path] = Library(name=name, path=path, is_deleted=is_deleted, build_id=mine)
    libraries = tuple(sorted(found.values(), key=lambda library: library.path))[:MAX_LIBRARIES]
    return str(procfs.path(process.pid, "maps")), Libraries(libraries=libraries)


def _build_id(procfs: ProcFs, pid: int, name: str, path: str) -> str:
    """Of the few of which it matters; the file is the one that the process sees."""
    if not _BUILD_MATTERS.match(name):
        return ""
    with contextlib.suppress(OSError):
        return build_id(procfs.path(pid, "root", path.lstrip("/")))
    return ""


ENVIRONMENT = Collector(
    "environment",
    lambda scene: each_process(scene, "environment", _environment),
    is_dynamic=False,
)
LIBRARIES = Collector(
    "libraries", lambda scene: each_process(scene, "libraries", _libraries), deadline_s=4.0, is_dynamic=False
)


# The build id of an ELF file: which build of a library is loaded, when two bear the same version. A file
# that is no ELF, or has no build id, gives an empty text and no error.


def build_id(path: Path) -> str:
    """As hexadecimal digits. Raises `OSError` when the file cannot be read."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:4] != _MAGIC or head[4] != _64_BIT or head[5] != _LITTLE:
            return ""
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        if size < _ENTRY.size:
            return ""
        file.seek(table)
        entries = file.read(size * count)
        for index in range(len(entries) // size):
            kind, _, offset, _, _, length, _, _ = _ENTRY.unpack_from(entries, index * size)
            if kind == _NOTE:
                file.seek(offset)
                if found := _in_notes(file.read(min(length, _MAX_NOTES_BYTES))):
                    return found
    return ""


def _in_notes(notes: bytes) -> str:
    place = 0
    while place + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, place)
        start = place + 12 + _padded(name_size)
        if kind == _BUILD_ID and notes[place + 12 : place + 12 + name_size] == b"GNU\0":
            return notes[start : start + size].hex()
        place = start + _padded(size)
    return ""


def _padded(size: int) -> int:
    return (size + 3) // 4 * 4
