"""Optimizer states that do not fit the engine are refused before anything of a checkpoint is loaded.

DeepSpeed keeps the optimizer's state by position: flat partitions under ZeRO, a list without. The states of another
expert-parallel size, another number of ranks or another order of parameters can have the very sizes this engine
expects; DeepSpeed then loads them as they lie, and training goes on from wrong moments and master weights without an
error. Module weights are saved by name, one file for each expert, and load at any expert-parallel size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
from pathlib import Path
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from ...groups import raise_together
from ...metrics import routed_layers

_REMEDY = "load_checkpoint(..., load_module_only=True) takes the weights alone and starts the optimizer anew"
_EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")


def guard_checkpoints(engine: Any) -> None:
    """Rebinds ``engine.load_checkpoint``: every rank raises the same ValueError for a checkpoint that does not fit.

    Of a model that has experts somewhere: a stage of a pipeline may have none.
    """
    load_checkpoint = engine.load_checkpoint
    signature = inspect.signature(load_checkpoint)

    @functools.wraps(load_checkpoint)
    def load_what_fits(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        wants_optimizer = given["load_optimizer_states"] and not given["load_module_only"]
        error: Exception | None = None
        try:
            folder = _folder(given["load_dir"], given["tag"])
            if folder is not None and not engine.load_universal_checkpoint():
                _check(engine, folder, optimizer=wants_optimizer and engine.optimizer is not None)
        except Exception as found:  # of whatever kind: the other ranks wait for this one
            error = found
        raise_together(error)
        result = load_checkpoint(*args, **kwargs)
        for _, layer in routed_layers(engine.module):
            layer.gate.step_counts.zero_()
        return result

    engine.load_checkpoint = load_what_fits


def _folder(load_dir: Any, tag: Any) -> Path | None:
    """Where the checkpoint lies; None where DeepSpeed will say itself that there is no latest one."""
    if tag is None:
        latest = Path(load_dir) / "latest"
        if not latest.is_file():
            return None
        tag = latest.read_text(encoding="utf-8").strip()
    return Path(load_dir) / str(tag)


def _check(engine: Any, folder: Path, *, optimizer: bool) -> None:
    saved = _read(Path(engine._get_ckpt_name(str(folder.parent), folder.name)))
    found, expected = saved.get("num_experts", []), engine.num_experts
    if isinstance(found, list) and found != expected:
        raise ValueError(
            f"checkpoint '{folder}' holds MoE layers of {found} experts, the model has {expected}: "
            "build the model as it was saved"
        )
    if not optimizer:
        return
    saved_at_zero = saved.get("param_shapes") is not None
    if saved_at_zero != engine.zero_optimization():
        raise ValueError(
            f"checkpoint '{folder}' was saved {'by' if saved_at_zero else 'without'} a ZeRO optimizer, this engine "
            f"runs ZeRO stage {engine.zero_optimization_stage()}: use the stage it was saved with; {_REMEDY}"
        )
    if saved_at_zero:
        _check_partitions(engine, folder, saved)
    elif engine.has_moe_layers:
        _check_expert_parallel_size(engine, folder)


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint's file, its tensors left on disk. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"checkpoint file '{path}' does not exist: check the folder and the tag")
    try:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except RuntimeError:  # of a format that cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling damaged bytes raises anything
        raise ValueError(
            f"checkpoint file '{path}' cannot be read ({type(error).__name__}: {error}): it is damaged or incomplete; "
            "load another tag"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint file '{path}' holds a {type(content).__name__}: it is no DeepSpeed checkpoint")
    return content


def _check_partitions(engine: Any, folder: Path, saved: dict[str, Any]) -> None:
    ranks = saved.get("dp_world_size")
    if ranks != engine.seq_dp_world_size:
        raise ValueError(
            f"checkpoint '{folder}' has optimizer states of {ranks} data-parallel ranks, this job has "
            f"{engine.seq_dp_world_size}: start {ranks}; {_REMEDY}"
        )
    own = [list(group.items()) for group in engine._get_zero_param_shapes()]
    theirs = [list(group.items()) for group in saved["param_shapes"]]
    # The file is the first data-parallel rank's, whose experts have the names and the order of every rank's.
    if theirs != own:
        raise ValueError(
            f"checkpoint '{folder}' has optimizer states in another order: {_first_difference(theirs, own)}; the "
            f"expert-parallel size, the layers and the optimizer's groups must be those it was saved with; {_REMEDY}"
        )
    path = engine._get_zero_ckpt_name(str(folder.parent), folder.name)
    if not os.path.exists(path):
        raise ValueError(f"checkpoint '{folder}' has no '{os.path.basename(path)}': another precision's; {_REMEDY}")


def _first_difference(theirs: list[list[Any]], own: list[list[Any]]) -> str:
    if [len(group) for group in theirs] != [len(group) for group in own]:
        return (
            f"groups of {[len(group) for group in theirs]} parameters on a rank, "
            f"the engine's hold {[len(group) for group in own]}"
        )
    pairs = zip(itertools.chain(*theirs), itertools.chain(*own), strict=True)
    saved, expected = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{saved[0]} {tuple(saved[1])} where the engine has {expected[0]} {tuple(expected[1])}"


def _check_expert_parallel_size(engine: Any, folder: Path) -> None:
    own = max(layer.ep_size for layer in engine.module.modules() if isinstance(layer, MoE))
    if engine.pipeline_parallelism:  # the states' files are numbered by the largest size of any stage
        own = groups._get_max_expert_size()
    names = [_EXPERT_OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir()]
    saved = 1 + max((int(name[1]) for name in names if name), default=-1)
    if saved != own:
        raise ValueError(
            f"checkpoint '{folder}' has optimizer states of {saved} expert-parallel ranks, the model has ep_size "
            f"{own}: build it with ep_size {saved}; {_REMEDY}"
        )
