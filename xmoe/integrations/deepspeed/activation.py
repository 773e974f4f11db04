"""DeepSpeed's activation checkpointing for the reference model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed


def activation_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function(*args)`` without its activations, by DeepSpeed's implementation and its JSON's settings."""
    return deepspeed.checkpointing.checkpoint(function, *args)
