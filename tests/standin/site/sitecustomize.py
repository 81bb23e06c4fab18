"""Python runs this at its start: `import torch` then finds the stand-in GPUs, and a command that needs no torch pays nothing."""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec


class TorchWithGpus(MetaPathFinder, Loader):
    """Finds torch, and puts the GPUs into it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        import standin_gpus.device  # its library registers the device guard, which torch looks for as it is imported

        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        standin_gpus.install()


if os.environ.get("STANDIN_GPUS"):
    sys.meta_path.insert(0, TorchWithGpus())
