"""Checkpoints of a run: runs/NAME/checkpoints/step_NNNNNNNN, written by DeepSpeed and sealed by a manifest.

``manifest.json`` is written last, so a folder without it is an interrupted save and is passed over. It holds what
the checkpoint was made with and every file's size; ``--resume`` compares both before DeepSpeed opens anything.
"""

from __future__ import annotations

import json
import logging
import random
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xmoe.config import ConfigError
from xmoe.files import replacing
from xmoe.groups import raise_together

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_TAG = re.compile(r"step_(\d+)")


def tag_of(step: int) -> str:
    return f"step_{step:08d}"


def rng_states() -> dict[str, Any]:
    """This rank's random states: Python, numpy, torch and, where there is one, the accelerator's."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def save(engine: Any, folder: Path, *, step: int, made_with: Mapping[str, Any]) -> Path:
    """Saves the engine after ``step`` finished steps and seals the checkpoint. Collective."""
    world = dist.get_world_size()
    states: list[Any] = [None] * world
    dist.all_gather_object(states, rng_states())
    # The data position is the step: the sampler is a function of it.
    client_state = {"step": step, "made_with": dict(made_with), "rng_states": states}
    target = folder / tag_of(step)
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            # A checkpoint saved again loses its seal first: half new, half old must not look whole.
            (target / MANIFEST).unlink(missing_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            error = RuntimeError(f"checkpoint {target} cannot be written ({problem.strerror})")
    raise_together(error)
    engine.save_checkpoint(str(folder), tag=target.name, client_state=client_state)
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            _seal(target, step=step, made_with=made_with)
        except OSError as problem:
            error = RuntimeError(f"checkpoint {target} cannot be sealed ({problem.strerror})")
    raise_together(error)
    return target


def _seal(target: Path, *, step: int, made_with: Mapping[str, Any]) -> None:
    files = {str(path.relative_to(target)): path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file()}
    content = {"format_version": FORMAT_VERSION, "step": step, "made_with": made_with, "files": files}
    with replacing(target / MANIFEST) as scratch:
        scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")


def newest(folder: Path) -> Path:
    """The sealed checkpoint of the highest step. Raises ConfigError when there is none."""
    found = [(int(match[1]), path) for path in _entries(folder) if (match := _TAG.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        if (path / MANIFEST).is_file():
            return path
        logger.warning("%s has no %s: its save was interrupted, an older checkpoint is used", path, MANIFEST)
    raise ConfigError(
        "--resume",
        str(folder),
        "holds no complete checkpoint; start without --resume, or name the run that has one with --name",
    )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def check(checkpoint: Path, made_with: Mapping[str, Any], *, rank: int, world: int) -> int:
    """Compares a checkpoint with this run, reads its files through once, and returns its step.

    Each of the ``world`` ranks reads its share of the files. Raises ConfigError naming the checkpoint, what is
    wrong with it, and the remedy.
    """
    remedy = f"remove {checkpoint} to resume from an older one, or start again with --overwrite"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        step, theirs, files = manifest["step"], manifest["made_with"], manifest["files"]
        version = manifest["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "--resume",
            str(checkpoint),
            f"cannot be read: {MANIFEST} is damaged ({type(error).__name__}); {remedy}",
        ) from None
    if version != FORMAT_VERSION:
        raise ConfigError(
            "--resume",
            str(checkpoint),
            f"has format {version}, this version reads {FORMAT_VERSION}; {remedy}",
        )
    if differences := _differences("", theirs, json.loads(json.dumps(made_with))):
        raise ConfigError(
            "--resume",
            str(checkpoint),
            f"was made with other settings: {'; '.join(differences)}. Use these settings again, or start another run "
            "with --name",
        )
    for name in sorted(files)[rank::world]:
        if problem := _damage(checkpoint / name, files[name]):
            raise ConfigError("--resume", str(checkpoint), f"cannot be read: {name} {problem}; {remedy}")
    return int(step)


def _differences(path: str, theirs: object, ours: object) -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys: Sequence[str] = sorted(theirs.keys() | ours.keys())
        return [
            line for key in keys for line in _differences(f"{path}.{key}".lstrip("."), theirs.get(key), ours.get(key))
        ]
    return [] if theirs == ours else [f"{path} is {theirs!r} there and {ours!r} here"]


def _damage(path: Path, num_bytes: int) -> str | None:
    try:
        if path.stat().st_size != num_bytes:
            return f"has {path.stat().st_size} bytes instead of {num_bytes}"
        if path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            return f"is damaged at {bad}" if bad else None
    except FileNotFoundError:
        return "is missing"
    except (OSError, zipfile.BadZipFile) as error:
        return f"is damaged ({error})"
    return None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def load(engine: Any, checkpoint: Path) -> int:
    """Loads weights, optimizer, schedule and random states, and returns the finished steps. Collective."""
    error: Exception | None = None
    client_state: dict[str, Any] = {}
    try:
        _, client_state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        restore_rng_states(client_state["rng_states"][dist.get_rank()])
    except (KeyError, RuntimeError, ValueError, TypeError, OSError) as problem:
        logger.debug("loading %s failed", checkpoint, exc_info=True)
        error = ConfigError(
            "--resume",
            str(checkpoint),
            f"cannot be loaded ({type(problem).__name__}: {first_line(problem)}); remove it to resume from an "
            "older one, or start again with --overwrite",
        )
    raise_together(error)
    return int(client_state["step"])
