"""Files written beside their place: whole or not there, and for those to read whom the umask says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from xmoe.files import replacing
from xmoe.kernels import tuning_cache
from xmoe.links import write_links
from xmoe.training.metrics_file import trim_after


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_are_readable_as_the_umask_says(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    links = tmp_path / "links.json"
    write_links(links, intra_node=None, inter_node=None, hosts=[], setting={})
    key = tuning_cache.Key(op="op", arch="arch", dtype="fp32", rows=16, sizes=(), triton="3")
    tuned = tuning_cache.write(key, {}, seconds=1.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    metrics.chmod(0o600)
    trim_after(metrics, 0)
    for path in (links, tuned, metrics):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


def spoil(target: Path) -> None:
    with replacing(target) as scratch:
        assert scratch.parent == target.parent
        assert scratch.suffix == ".png"
        scratch.write_text("new")
        raise KeyboardInterrupt


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "picture.png"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        spoil(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
