"""A warning for settings that nothing reads: an ``"xmoe"`` section under plain ``deepspeed.initialize``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import FrameType

from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger(__name__)

_warned = False


def warn_of_unread_section() -> None:
    """One warning, on rank 0, when the engine that is being made has an ``"xmoe"`` section in its config.

    For a layer that ``xmoe.initialize`` has not configured. DeepSpeed calls a layer with neither the engine nor the
    config, so the engine is looked for among the callers.
    """
    global _warned
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _warned:
        engine = frame.f_locals.get("self")
        if isinstance(engine, DeepSpeedEngine):
            if isinstance(engine.config, Mapping) and "xmoe" in engine.config and engine.global_rank == 0:
                _warned = True
                logger.warning(
                    'the "xmoe" section of the DeepSpeed config is not read by deepspeed.initialize: call '
                    "xmoe.initialize in its place, or xmoe.patch_deepspeed() at the start of the script"
                )
            return
        frame = frame.f_back
