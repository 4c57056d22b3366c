"""What is imported is declared, and what is declared is needed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

from shape.source import REPOSITORY, modules

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Import names that differ from the names of their distributions.
DISTRIBUTIONS = {"zmq": "pyzmq", "pynvml": "nvidia-ml-py", "starlette": "fastapi", "yaml": "pyyaml"}
# Used by uvicorn when they are there, and by name only; py-spy is a program that the doctor starts.
USED_BY_NAME = {"uvicorn", "uvloop", "httptools", "py-spy"}


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0] for requirement in requirements}


def imported() -> set[str]:
    names: set[str] = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return {
        DISTRIBUTIONS.get(n, n).replace("_", "-") for n in names - sys.stdlib_module_names - {"firstlight"}
    }


def test_imports_and_declarations_agree() -> None:
    needed = declared(PROJECT["dependencies"])
    optional = PROJECT["optional-dependencies"]
    named = ("plots", "cuda", "drafter", "remote-code")
    extras = declared([requirement for name in named for requirement in optional[name]])
    assert imported() - needed - extras == set(), "imported, but not declared"
    assert needed - imported() - USED_BY_NAME == set(), "declared, but not imported"
