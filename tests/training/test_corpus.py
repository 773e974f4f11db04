"""The byte corpus: what is read, how it is split, and that its cache is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoe.config import ConfigError, DataConfig
from xmoe.training import corpus as corpus_module
from xmoe.training.baselines import measure_baselines
from xmoe.training.corpus import (
    TextFile,
    find_files,
    open_corpus,
    plan_corpus,
    read_distinct,
    split_files,
    write_corpus,
)


def text_file(name: str, num_bytes: int) -> TextFile:
    return TextFile(path=Path(name), num_bytes=num_bytes, digest=f"digest of {name}")


def write(folder: Path, **contents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.txt").write_text(content)
    return folder


def config(*paths: Path, cache: Path | None = None, **settings: object) -> DataConfig:
    return DataConfig(
        paths=[str(path) for path in paths], cache_dir=str(cache or "unused"), sequence_length=8, **settings
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "text", **{f"f{i}": f"file {i} " * (i + 3) for i in range(12)})


sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=30)


@given(sizes=sizes, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 5))
@settings(deadline=None)
def test_split_puts_every_file_on_exactly_one_side_and_both_have_one(
    sizes: list[int], fraction: float, seed: int
) -> None:
    files = [text_file(f"f{i}", size) for i, size in enumerate(sizes)]
    split = split_files(files, held_out_fraction=fraction, seed=seed)
    assert sorted(f.digest for f in split.train + split.held_out) == sorted(f.digest for f in files)
    assert split.train
    assert split.held_out
    held_out = sum(f.num_bytes for f in split.held_out)
    assert held_out <= fraction * sum(sizes) or split.held_out == (min(split.held_out, key=lambda f: f.num_bytes),)


@given(order=st.permutations(range(12)), seed=st.integers(0, 5))
@settings(deadline=None)
def test_split_depends_on_seed_and_contents_and_not_on_order(order: list[int], seed: int) -> None:
    files = [text_file(f"f{i}", 10 + i) for i in range(12)]
    one = split_files(files, held_out_fraction=0.3, seed=seed)
    other = split_files([files[i] for i in order], held_out_fraction=0.3, seed=seed)
    assert one == other


def test_seeds_give_different_splits() -> None:
    files = [text_file(f"f{i}", 10) for i in range(12)]
    assert len({split_files(files, held_out_fraction=0.3, seed=seed).fingerprint() for seed in range(5)}) == 5


def test_a_renamed_folder_gives_the_same_corpus(tmp_path: Path) -> None:
    contents = {f"f{i}": f"content {i}" * 5 for i in range(6)}
    one = write(tmp_path / "one", **contents)
    other = write(tmp_path / "other", **{f"renamed_{name}": text for name, text in contents.items()})
    assert plan_corpus(config(one)).fingerprint() == plan_corpus(config(other)).fingerprint()


def test_exact_duplicates_count_once_and_never_cross_the_split(folder: Path) -> None:
    for i in range(12):
        (folder / f"copy_of_{i}.txt").write_bytes((folder / f"f{i}.txt").read_bytes())
    split = plan_corpus(config(folder, folder / "f3.txt"))
    assert split.num_duplicates == 12
    digests = [f.digest for f in split.train + split.held_out]
    assert len(digests) == len(set(digests)) == 12


def test_folders_are_read_without_hidden_installed_and_binary_files(folder: Path) -> None:
    for name in (".hidden.txt", ".git/x.txt", "site-packages/x.txt", "__pycache__/x.txt", "image.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("unwanted")
    (folder / "binary.txt").write_bytes(b"text\0text")
    (folder / "empty.txt").write_bytes(b"")
    files, num_duplicates = read_distinct(find_files(config(folder)))
    assert sorted(f.path.name for f in files) == sorted(f"f{i}.txt" for i in range(12))
    assert num_duplicates == 0


def test_the_default_is_the_standard_library() -> None:
    names = {path.name for path in find_files(DataConfig())}
    assert {"argparse.py", "json", "decoder.py"} & names >= {"argparse.py", "decoder.py"}
    assert not any("site-packages" in str(path) for path in find_files(DataConfig()))


def test_the_streams_hold_each_file_and_a_zero_byte(folder: Path, tmp_path: Path) -> None:
    split = plan_corpus(config(folder))
    corpus = open_corpus(write_corpus(split, tmp_path / "cache"))
    for stream, files in ((corpus.train, split.train), (corpus.held_out, split.held_out)):
        assert bytes(stream) == b"".join(f.path.read_bytes() + b"\0" for f in files)


def test_a_complete_cache_is_used_as_it_is(folder: Path, tmp_path: Path) -> None:
    split = plan_corpus(config(folder))
    first = write_corpus(split, tmp_path / "cache")
    stamp = (first / "train.bin").stat().st_mtime_ns
    assert write_corpus(split, tmp_path / "cache") == first
    assert (first / "train.bin").stat().st_mtime_ns == stamp


def test_a_damaged_cache_is_replaced(folder: Path, tmp_path: Path) -> None:
    split = plan_corpus(config(folder))
    cache = write_corpus(split, tmp_path / "cache")
    good = (cache / "train.bin").read_bytes()
    (cache / "train.bin").write_bytes(good[:-3])
    with pytest.raises(ConfigError, match=r"data\.cache_dir .* damaged"):
        open_corpus(cache)
    write_corpus(split, tmp_path / "cache")
    assert bytes(open_corpus(cache).train) == good
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


def test_nothing_is_left_when_packing_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "_pack", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        write_corpus(plan_corpus(config(folder)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_changes_while_it_is_packed_is_an_error(folder: Path, tmp_path: Path) -> None:
    split = plan_corpus(config(folder))
    split.train[0].path.write_text("other")
    with pytest.raises(RuntimeError, match="changed while it was packed"):
        write_corpus(split, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        pytest.param(None, r"data\.paths\[0\] is '.*missing': no such file", id="missing"),
        pytest.param({}, r"data\.paths is .*: no file ends in", id="no-files"),
        pytest.param({"a": ""}, r"data\.paths is .*: holds fewer than two", id="empty"),
        pytest.param({"a": "only one" * 9, "b": "only one" * 9}, "holds fewer than two", id="one-content"),
        pytest.param(
            {"a": "x" * 99, "b": "y"}, r"data\.sequence_length is 8: the held-out text has only 2", id="short"
        ),
    ],
)
def test_wrong_text_is_one_error_and_writes_nothing(
    tmp_path: Path, contents: dict[str, str] | None, message: str
) -> None:
    folder = tmp_path / "missing" if contents is None else write(tmp_path / "text", **contents)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        plan_corpus(config(folder))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cache_folder_that_cannot_be_made_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        write_corpus(plan_corpus(config(folder)), tmp_path / "file" / "cache")


def test_meta_lists_the_files_of_both_sides(folder: Path, tmp_path: Path) -> None:
    cache = write_corpus(plan_corpus(config(folder)), tmp_path / "cache")
    files = json.loads((cache / "meta.json").read_text())["files"]
    assert len(files["train"]) + len(files["held_out"]) == 12


def test_baselines_of_hand_computed_streams() -> None:
    alternating = np.frombuffer(b"ab" * 500 + b"a", dtype=np.uint8)
    assert measure_baselines(alternating).unigram_bits_per_byte == pytest.approx(1.0, abs=1e-3)
    assert measure_baselines(alternating).bigram_bits_per_byte == pytest.approx(0.0, abs=1e-9)
    # After a comes a or b equally often, after b always a: pairs aa, ab, ba, H = 2/3 * 1 bit.
    mixed = np.frombuffer(b"aab" * 1000 + b"a", dtype=np.uint8)
    assert measure_baselines(mixed).bigram_bits_per_byte == pytest.approx(2 / 3, abs=1e-9)
