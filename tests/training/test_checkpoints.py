"""Finding and judging checkpoints before DeepSpeed opens one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from xmoe.config import ConfigError
from xmoe.training import checkpoints

MADE_WITH = {"model": {"hidden_size": 16, "num_layers": 2}, "ranks": 4}


def make(folder: Path, step: int, *, sealed: bool = True) -> Path:
    target = folder / checkpoints.tag_of(step)
    target.mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "layer_0.pt"):
        torch.save({"weights": torch.arange(1000)}, target / name)
    if sealed:
        checkpoints._seal(target, step=step, made_with=MADE_WITH)
    return target


def check(target: Path, made_with: dict[str, object] | None = None) -> int:
    return checkpoints.check(target, made_with or MADE_WITH, rank=0, world=1)


def test_the_newest_sealed_checkpoint_is_used(tmp_path: Path) -> None:
    make(tmp_path, 9)
    expected = make(tmp_path, 10)
    make(tmp_path, 100, sealed=False)
    assert checkpoints.newest(tmp_path) == expected
    assert check(expected) == 10


@pytest.mark.parametrize("existing", ["nothing", "unsealed", "other"])
def test_no_checkpoint_is_one_error_with_its_remedy(tmp_path: Path, existing: str) -> None:
    folder = tmp_path / "checkpoints"
    if existing == "unsealed":
        make(folder, 5, sealed=False)
    if existing == "other":
        (folder / "global_step5").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--resume is .*checkpoints': holds no complete checkpoint; start without"):
        checkpoints.newest(folder)


def test_another_shape_names_every_difference(tmp_path: Path) -> None:
    target = make(tmp_path, 3)
    with pytest.raises(ConfigError) as caught:
        check(target, {"model": {"hidden_size": 32, "num_layers": 2}, "ranks": 2})
    message = str(caught.value)
    assert "model.hidden_size is 16 there and 32 here; ranks is 4 there and 2 here" in message
    assert str(target) in message
    assert "--name" in message


def damage_truncate(target: Path) -> None:
    path = target / "layer_0.pt"
    path.write_bytes(path.read_bytes()[:-10])


def damage_flip(target: Path) -> None:
    path = target / "layer_0.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - b for b in content[middle : middle + 64])
    path.write_bytes(content)


def damage_remove(target: Path) -> None:
    (target / "layer_0.pt").unlink()


def damage_manifest(target: Path) -> None:
    (target / checkpoints.MANIFEST).write_text("{")


def damage_version(target: Path) -> None:
    content = json.loads((target / checkpoints.MANIFEST).read_text())
    (target / checkpoints.MANIFEST).write_text(json.dumps(content | {"format_version": 99}))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (damage_truncate, r"layer_0\.pt has \d+ bytes instead of \d+"),
        (damage_flip, r"layer_0\.pt is damaged"),
        (damage_remove, r"layer_0\.pt is missing"),
        (damage_manifest, r"manifest\.json is damaged"),
        (damage_version, r"has format 99, this version reads 1"),
    ],
)
def test_an_unreadable_checkpoint_is_one_error(tmp_path: Path, damage: object, found: str) -> None:
    target = make(tmp_path, 3)
    damage(target)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=found) as caught:
        check(target)
    assert str(target) in str(caught.value)
    assert "--overwrite" in str(caught.value)


def test_the_files_are_shared_out_over_the_ranks(tmp_path: Path) -> None:
    target = make(tmp_path, 3)
    damage_truncate(target)
    failed = []
    for rank in range(4):
        try:
            checkpoints.check(target, MADE_WITH, rank=rank, world=4)
        except ConfigError:
            failed.append(rank)
    assert len(failed) == 1


def test_random_states_continue() -> None:
    states = checkpoints.rng_states()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    checkpoints.restore_rng_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
