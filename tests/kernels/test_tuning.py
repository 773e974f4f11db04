"""Configurations: what is searched, what is left out, and winners on disk that many processes write at once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from xmoe.kernels import tuning_cache
from xmoe.kernels.launch import recording
from xmoe.kernels.tuning import ARCHES, INTERPRETER, Config, asking, config_for, forcing, forget_winners, keep_winner
from xmoe.kernels.tuning_search import GEMMS, LDS_BYTES, candidates, fits, lds_bytes, search, tune

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    forget_winners()
    yield tmp_path / "tuning"
    forget_winners()


def key_of(**changes: object) -> tuning_cache.Key:
    with asking() as keys:
        config_for("grouped_wgrad", arch="gfx90a", dtype=BF16, rows=1000, sizes=(8, 64, 32))
    return replace(keys[0], **changes)


def wgrad(rows: int = 1000, *, arch: str = "gfx90a") -> Config:
    return config_for("grouped_wgrad", arch=arch, dtype=BF16, rows=rows, sizes=(8, 64, 32))


# Candidates


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("op", "width"), [*((op, 0) for op in GEMMS), ("grouped_forward_activated", 2)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_candidates_start_with_the_default_and_all_fit(dtype: torch.dtype, op: str, width: int, arch: str) -> None:
    of = dict(arch=arch, dtype=dtype, width=width)
    found = candidates(op, **of)
    assert found[0] == config_for(op, **of)
    assert all(found.count(config) == 1 for config in found)
    assert 10 <= len(found) <= 100
    assert all(fits(op, config, **of) for config in found)
    assert all(lds_bytes(op, config, **of) <= LDS_BYTES[arch] for config in found)
    assert all(config.blocks.keys() == found[0].blocks.keys() for config in found)


@pytest.mark.parametrize("op", ["gather", "combine", "row_dot", "activation_forward", "gate_forward", "plan"])
def test_other_kernels_have_candidates_too(op: str) -> None:
    found = candidates(op, arch="gfx942", dtype=BF16, width=64)
    assert len(found) > 4
    assert all(min(config.blocks.values()) >= 1 for config in found)


def test_in_thread_transposition_is_searched_on_mi250x_where_it_is_no_default() -> None:
    knobs = [dict(config.knobs) for config in candidates("gathered_wgrad", arch="gfx90a", dtype=BF16)]
    assert knobs[0] == {}
    assert {"use_in_thread_transpose": True} in knobs
    assert all(not config.knobs for config in candidates("grouped_forward", arch="gfx90a", dtype=BF16))
    assert all(not config.knobs for config in candidates("grouped_wgrad", arch="gfx942", dtype=BF16))


@pytest.mark.parametrize(
    ("arch", "blocks", "warps", "reason"),
    [
        ("gfx90a", {"BLOCK_ROWS": 256}, 8, "128 KB of LDS"),
        ("gfx942", {"BLOCK_ROWS": 128}, 4, "64 KB of LDS, twice"),
        ("gfx942", {"BLOCK_OUT": 256, "BLOCK_IN": 256, "BLOCK_ROWS": 16}, 4, "256 sums a lane"),
        ("sm_80", {"BLOCK_OUT": 256, "BLOCK_IN": 256, "BLOCK_ROWS": 16}, 8, "256 sums a lane"),
    ],
)
def test_what_cannot_fit_is_not_compiled(arch: str, blocks: dict[str, int], warps: int, reason: str) -> None:
    base = wgrad(arch=arch)
    config = replace(base, blocks={**base.blocks, "BLOCK_OUT": 128, "BLOCK_IN": 128, **blocks}, num_warps=warps)
    assert not fits("grouped_wgrad", config, arch=arch, dtype=BF16), reason
    assert fits("grouped_wgrad", replace(config, blocks=base.blocks, num_warps=8), arch=arch, dtype=BF16)


COMPILE = '''
import random, torch
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.compile import compile_launch
from xmoe.kernels.launch import recording
from xmoe.kernels.ragged import Stacked, TileSchedule
from xmoe.kernels.tuning import forcing
from xmoe.kernels.tuning_search import candidates, lds_bytes

def empty(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")

def integers(size):
    return empty(size, dtype=torch.int32)

def run(op, block_m):
    rows = TileSchedule(offsets_e1=integers(9), tile_expert=integers(16), tile_row=integers(16),
                        num_tiles=integers(1), max_tiles=16, num_rows=1024, block_m=block_m)
    weights = Stacked(first=empty(256, 512), stride=256 * 512, num_experts=8)
    if op == "grouped_wgrad":
        kernels.grouped_wgrad(empty(1024, 256), empty(1024, 512), rows)
    elif op == "grouped_dgrad":
        kernels.grouped_dgrad(empty(1024, 256), weights, rows)
    else:
        kernels.grouped_forward_activated(empty(512, 512), weights, weights, rows, row_ids_M=integers(1024),
                                          weights_M=empty(1024, dtype=torch.float32), activation="swiglu")

def is_small(config):
    """Soon compiled: a tile of 64 by 128 at most. The formula is linear in a tile's height and width."""
    sides = [size for name, size in config.blocks.items() if name in ("BLOCK_M", "BLOCK_N", "BLOCK_OUT", "BLOCK_IN")]
    return sides[0] * sides[1] <= 64 * 128

random.seed(0)
recorded = {}
for arch, op in [("gfx90a", "grouped_wgrad"), ("gfx942", "grouped_forward_activated"),
                 ("gfx950", "grouped_forward_activated"), ("sm_80", "grouped_dgrad"), ("sm_90", "grouped_wgrad")]:
    of = dict(arch=arch, dtype=torch.bfloat16, width=2 if "activated" in op else 0)
    found = candidates(op, **of)
    config = random.choice([c for c in found if c.knobs] or [c for c in found if is_small(c)])
    with forcing({op: config}), recording(arch) as calls:
        run(op, config.blocks.get("BLOCK_M", 128))
    recorded[arch, op] = calls[0]
    shared = compile_launch(calls[0], arch).shared_bytes
    print(arch, op, shared, lds_bytes(op, config, **of), bool(config.knobs))
'''


# After the above, in its process: to import Triton takes as long as to compile with it.
KNOBS = """
import dataclasses, triton
from xmoe.kernels.launch import _variant, compiler_knobs, launch

turned = recorded["gfx90a", "grouped_wgrad"]
plain = dataclasses.replace(turned, config=dataclasses.replace(turned.config, knobs={}))
permutes = [compile_launch(call, "gfx90a").assembly.count("v_perm_b32") for call in (plain, turned)]
assert triton.knobs.amd.use_in_thread_transpose is None
kernel, knobs = plain.kernel, frozenset(turned.config.knobs.items())
assert _variant(kernel, knobs) is _variant(kernel, knobs)
assert _variant(kernel, knobs).device_caches is not kernel.device_caches
assert _variant(kernel, knobs).cache_key == kernel.cache_key

# In place of the driver, which is not there: what is set while a launch compiles, and what else.
seen = []
def compiling(self, *arguments, **keywords):
    seen.append(triton.knobs.amd.use_in_thread_transpose)
triton.runtime.jit.JITFunction._do_compile = compiling
def running(self, *arguments, grid, warmup, **keywords):
    seen.append(triton.knobs.amd.use_in_thread_transpose)
    self._do_compile()
triton.runtime.jit.JITFunction.run = running
_variant.cache_clear()
for call in (plain, turned):
    launch(call)
assert seen == [None, None, None, True], seen
assert triton.knobs.amd.use_in_thread_transpose is None
try:
    with compiler_knobs({"no_such_knob": True}):
        pass
except ValueError as error:
    assert "no_such_knob" in str(error)
else:
    raise AssertionError("an unknown knob was taken")
print(compile_launch(plain, "gfx90a").assembly.count("v_perm_b32") == permutes[0], permutes[0] != permutes[1])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the two scripts above print, by lines."""
    path = str(tmp_path_factory.mktemp("triton"))
    environment = {"TRITON_CACHE_DIR": path, "PATH": "/usr/bin:/bin", "HOME": path}
    result = subprocess.run([sys.executable, "-c", COMPILE + KNOBS], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_formula_is_what_the_compiler_takes(compiled: list[str]) -> None:
    lines = [line.split() for line in compiled[:-1]]
    assert len(lines) == 5
    assert sum(line[-1] == "True" for line in lines) == 1, "in-thread transposition was not compiled"
    for arch, op, shared, formula, _ in lines:
        assert 0.96 * int(formula) <= int(shared) <= int(formula), (arch, op, shared, formula)


@pytest.mark.slow
def test_knobs_reach_the_compiler_for_their_configuration_alone(compiled: list[str]) -> None:
    assert compiled[-1] == "True True"


# Search


def config(block: int) -> Config:
    return Config(blocks={"BLOCK": block})


def test_the_fastest_median_wins_and_runs_are_interleaved() -> None:
    order: list[int] = []
    # The first is slower in the median, though it has the fastest run.
    times = {1: iter([0.1, 3.0, 3.0]), 2: iter([2.0, 2.0, 8.0])}

    def measure(tried: Config) -> float:
        order.append(tried.blocks["BLOCK"])
        return next(times[tried.blocks["BLOCK"]])

    found = search([config(1), config(2)], measure, check=lambda tried: order.append(-tried.blocks["BLOCK"]), rounds=3)
    assert [one.config.blocks["BLOCK"] for one in found] == [2, 1]
    assert [one.seconds for one in found] == [2.0, 3.0]
    assert order == [-1, -2] + [1, 2] * 3


def test_a_configuration_that_fails_is_skipped_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def check(tried: Config) -> None:
        if tried.blocks["BLOCK"] == 64:
            raise RuntimeError("out of resource: shared memory\nand much more text")

    with caplog.at_level(logging.WARNING):
        found = search([config(32), config(64)], lambda tried: 1.0, check=check, rounds=1)
    assert [one.config for one in found] == [config(32)]
    assert len(caplog.records) == 1
    assert "'BLOCK': 64" in caplog.text
    assert "out of resource: shared memory" in caplog.text
    assert "much more" not in caplog.text
    with pytest.raises(ValueError, match="no configuration runs"):
        search([config(64)], lambda tried: 1.0, check=check)


def test_a_winner_is_found_by_the_batches_of_its_bucket_and_of_its_neighbours() -> None:
    wanted = candidates("grouped_wgrad", arch="gfx90a", dtype=BF16)[7]
    forced: list[Config] = []

    def measure() -> float:
        forced.append(wgrad())
        return 1.0 if forced[-1] == wanted else 2.0

    (winner,) = tune([key_of(), key_of()], measure, check=lambda: None, rounds=1)
    assert winner.found.config == wanted
    assert winner.default_seconds == 2.0
    assert len(set(map(repr, forced))) == winner.num_candidates > 20
    assert wgrad(rows=513) == wgrad(rows=1024) == wanted
    default = candidates("grouped_wgrad", arch="gfx90a", dtype=BF16)[0]
    assert default != wanted
    assert wgrad(rows=2048) == wgrad(rows=257) == wanted, "a neighbouring bucket has no winner of its own"
    assert wgrad(rows=2049) == wgrad(rows=256) == wgrad(rows=0) == default
    other = candidates("grouped_wgrad", arch="gfx90a", dtype=BF16)[9]
    keep_winner(key_of(rows=2048), other, seconds=1.0)
    assert wgrad(rows=1025) == other
    assert wgrad(rows=1024) == wanted
    assert config_for("grouped_wgrad", arch="gfx90a", dtype=torch.float16, rows=1000, sizes=(8, 64, 32)) == default
    assert config_for("grouped_wgrad", arch="gfx90a", dtype=BF16, rows=1000, sizes=(8, 64, 33)) == default


def test_a_fast_configuration_with_a_wrong_result_does_not_win(caplog: pytest.LogCaptureFixture) -> None:
    wrong = next(c for c in candidates("gathered_wgrad", arch="gfx90a", dtype=BF16) if c.knobs)

    def is_wrong() -> bool:
        return config_for("gathered_wgrad", arch="gfx90a", dtype=BF16) == wrong

    def check() -> None:
        if is_wrong():
            raise RuntimeError("result 0 of 1 is not that of the PyTorch twin")

    with asking() as keys:
        is_wrong()
    (winner,) = tune(keys, lambda: 1.0 if is_wrong() else 2.0, check=check, rounds=1)
    assert winner.found.seconds == 2.0
    assert winner.found.config != wrong
    assert "use_in_thread_transpose" in caplog.text


def test_recorded_launches_and_the_interpreter_never_take_a_winner() -> None:
    default = wgrad()
    keep_winner(key_of(), replace(default, num_warps=1), seconds=1.0)
    assert wgrad().num_warps == 1
    with recording("gfx90a"):
        assert wgrad() == default
    interpreter = wgrad(arch=INTERPRETER)
    keep_winner(key_of(arch=INTERPRETER), replace(interpreter, num_warps=1), seconds=1.0)
    assert wgrad(arch=INTERPRETER) == interpreter


def test_a_forced_configuration_counts_first() -> None:
    with forcing({"grouped_wgrad": config(1)}), forcing({"gather": config(2)}):
        assert wgrad() == config(1)
        assert config_for("gather", arch="gfx90a", dtype=BF16, width=64) == config(2)
    assert wgrad() != config(1)


# Files


@pytest.mark.parametrize(("rows", "bucket"), [(0, 0), (1, 16), (16, 16), (17, 32), (1024, 1024), (1025, 2048)])
def test_rows_share_buckets(rows: int, bucket: int) -> None:
    assert tuning_cache.bucket(rows) == bucket


def test_no_two_keys_share_a_file() -> None:
    keys = [
        key_of(),
        key_of(op="gathered_wgrad"),
        key_of(arch="gfx942"),
        key_of(dtype="float16"),
        key_of(rows=2048),
        key_of(sizes=(8, 64)),
        key_of(triton="3.9.1"),
    ]
    assert len({key.path() for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 0}',
        "\x00\x01",
        "other-key",
        "other-blocks",
        "no-config",
        "unknown-field",
        "text-for-a-number",
    ],
)
def test_what_is_corrupt_or_foreign_is_ignored_with_a_line(content: str, caplog: pytest.LogCaptureFixture) -> None:
    default, key = wgrad(), key_of()
    forget_winners()
    path = tuning_cache.write(key, asdict(replace(default, num_warps=1)), seconds=1.0)
    whole = json.loads(path.read_text())
    changed = {
        "other-key": {**whole, "key": {**whole["key"], "arch": "gfx942"}},
        "other-blocks": {**whole, "config": {**whole["config"], "blocks": {"BLOCK": 1}}},
        "no-config": {**whole, "config": 3},
        "text-for-a-number": {**whole, "config": {**whole["config"], "num_warps": "four"}},
        "unknown-field": {**whole, "config": {**whole["config"], "lanes": 64}},
    }
    path.write_text(json.dumps(changed[content]) if content in changed else content)
    forget_winners()
    with caplog.at_level(logging.WARNING):
        assert wgrad() == default
        assert wgrad() == default
    assert len(caplog.records) == 1
    assert "ignoring the tuning result" in caplog.text


def test_a_file_is_read_once_in_a_process() -> None:
    default = wgrad()
    key_of().path().parent.mkdir(parents=True)
    key_of().path().write_text("written behind the process's back")
    assert wgrad() == default


def test_a_folder_that_cannot_be_read_is_no_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path / "file"))
    assert wgrad() == candidates("grouped_wgrad", arch="gfx90a", dtype=BF16)[0]
    with pytest.raises(OSError, match="file"):
        tuning_cache.write(key_of(), {}, seconds=1.0)


def write_many(writer: int, start: object, failures: object) -> None:
    """Winners of one's own, and one that all write: whoever reads it finds one of them, whole."""
    start.wait()
    for turn in range(40):
        mine = Config(blocks={"BLOCK": writer, "TURN": turn, "PAD": 10**200})
        tuning_cache.write(key_of(op=f"own{writer}", rows=turn), asdict(mine), seconds=1.0)
        tuning_cache.write(key_of(op="shared"), asdict(mine), seconds=1.0)
        found = tuning_cache.find(key_of(op="shared"))
        if found is None or found["blocks"].keys() != mine.blocks.keys():
            failures.put((writer, turn, found))


def test_many_processes_write_at_once_and_lose_nothing(folder: Path) -> None:
    processes = multiprocessing.get_context("fork")
    start, failures = processes.Barrier(4), processes.Queue()
    writers = [processes.Process(target=write_many, args=(writer, start, failures)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=100)
    assert [process.exitcode for process in writers] == [0] * 4
    assert failures.empty(), failures.get()
    for writer in range(4):
        for turn in range(40):
            found = tuning_cache.find(key_of(op=f"own{writer}", rows=turn))
            assert found is not None
            assert (found["blocks"]["BLOCK"], found["blocks"]["TURN"]) == (writer, turn)
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 4 * 40 + 1  # none half written
