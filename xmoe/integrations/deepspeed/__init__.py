"""The only part of xmoe that imports DeepSpeed: the drop-in layer, ``initialize`` and what they mend.

moe.py         ``MoE``, around ``xmoe.layer.RoutedMLP``
engine.py      ``initialize``, ``init_distributed``
checks.py      what must hold before the first collective
dispatchers.py the dispatcher that a layer's settings ask for
sequence.py    which ranks share a layer's tokens in slices
pipeline.py    groups and checks that the stages of a pipeline agree on
gradients.py   gradient norm and clipping where DeepSpeed's leave experts out
checkpoints.py optimizer states that do not fit are refused, not loaded as they lie
replace.py     ``replace_moe_layers``, for live models
patch.py       ``patch_deepspeed``, for scripts that stay as they are
unread.py      the warning for those that forgot it
timing.py      the layers' times in DeepSpeed's log
"""

from __future__ import annotations

import torch as _torch  # noqa: F401  (of two missing packages the more basic one is named)

from .checks import moe_param_groups as moe_param_groups
from .engine import init_distributed as init_distributed
from .engine import initialize as initialize
from .moe import MoE as MoE
from .patch import patch_deepspeed as patch_deepspeed
from .replace import replace_moe_layers as replace_moe_layers
