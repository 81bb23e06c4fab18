"""Python runs this at its start: `import torch` then finds the stand-in GPUs, and a command that needs no torch pays nothing."""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec


class Changed(MetaPathFinder, Loader):
    """Finds the module `name`, and calls `change` with it when it is imported."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        if self._name == "torch":
            import standin_gpus.device  # noqa: F401 - its library registers the guard that torch looks for as it is imported

        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._change(module)


def _install(_):
    import standin_gpus

    standin_gpus.install()


if os.environ.get("STANDIN_GPUS"):
    if os.environ.get("TRITON_INTERPRET") != "1":
        # its kernels cannot be compiled, and nobody is to wait for the interpreter who has not asked for it
        sys.modules |= dict.fromkeys(("triton", "liger_kernel"))
    sys.meta_path.insert(0, Changed("torch", _install))
