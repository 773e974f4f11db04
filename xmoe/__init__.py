"""xmoe: mixture-of-experts training with DeepSpeed on AMD and other HPC machines.

``from xmoe import MoE`` replaces ``deepspeed.moe.layer.MoE``; ``xmoe.initialize`` replaces ``deepspeed.initialize``
and reads the ``"xmoe"`` section of the DeepSpeed JSON. Importing this package imports neither torch nor
DeepSpeed: public names are resolved on first use, so that a login node without torch can still run the planner
and print the configuration schema.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ConfigError as ConfigError
    from .config import XMoEConfig as XMoEConfig
    from .integrations.deepspeed import MoE as MoE
    from .integrations.deepspeed import initialize as initialize
    from .integrations.deepspeed import patch_deepspeed as patch_deepspeed
    from .layer import RoutedMLP as RoutedMLP

__version__ = "0.1.0"

_PUBLIC = {
    "MoE": "xmoe.integrations.deepspeed",
    "initialize": "xmoe.integrations.deepspeed",
    "patch_deepspeed": "xmoe.integrations.deepspeed",
    "replace_moe_layers": "xmoe.integrations.deepspeed",
    "RoutedMLP": "xmoe.layer",
    "ConfigError": "xmoe.config",
    "XMoEConfig": "xmoe.config",
}

# torch is never a requirement of the wheel: a ROCm machine has a build of its own that must not be replaced.
_INSTALL = {
    "torch": "pip install torch (on an HPC machine: the centre's own build, e.g. by its module)",
    "deepspeed": "pip install 'deepspeed>=0.19.8,<0.20'",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'xmoe' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _INSTALL:
            raise
        raise ImportError(f"xmoe.{name} needs the package {missing!r}: {_INSTALL[missing]}", name=missing) from error


def __dir__() -> list[str]:
    return sorted(__all__)
