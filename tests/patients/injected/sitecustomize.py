"""Found by every Python process of a patient: makes one process of it behave as broken code would.

The variable names a process, a module and one of the functions in `changes`, which is called with the module
once that is imported. Invariant: all other processes import nothing more than this.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class _AfterImport(MetaPathFinder):
    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _is_meant(words):
    command = " ".join(sys.orig_argv)
    return all(word in command for word in words)


_order = json.loads(os.environ.get("XDG_SESSION_NOTES", "null"))
if _order and _is_meant(_order["process"]):
    import changes

    _change = getattr(changes, _order["change"])
    _arguments = _order["arguments"]
    sys.meta_path.insert(0, _AfterImport(_order["module"], lambda module: _change(module, **_arguments)))
