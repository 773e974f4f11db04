"""The only part of xmoe that imports DeepSpeed: the drop-in layer, ``initialize`` and what they mend.

    moe.py         ``MoE``, around ``xmoe.layer.RoutedMLP``
    engine.py      ``initialize``, ``init_distributed``
    checks.py      what must hold before the first collective
    gradients.py   gradient norm and clipping where DeepSpeed's leave experts out
"""

from __future__ import annotations

try:
    import deepspeed as _deepspeed  # noqa: F401
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "deepspeed"):
        raise
    _COMMANDS = {
        "torch": "pip install torch (on a ROCm machine: your centre's build of torch, which xmoe never replaces)",
        "deepspeed": "pip install 'deepspeed>=0.19.8,<0.20'",
    }
    raise ModuleNotFoundError(
        f"xmoe's layer needs the package {error.name!r}, which is not installed: {_COMMANDS[error.name]}",
        name=error.name,
    ) from None

from .checks import moe_param_groups as moe_param_groups
from .engine import init_distributed as init_distributed
from .engine import initialize as initialize
from .moe import MoE as MoE
from .moe import replace_moe_layers as replace_moe_layers
