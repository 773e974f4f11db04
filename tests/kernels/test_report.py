"""What the compilers make of the default configurations, pinned, so that a Triton upgrade that breaks one is seen.

Compiling is done in processes of their own: this one's kernels are Triton's interpreter's.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from xmoe.kernels import report
from xmoe.kernels.assembly import Figures, HotLoop
from xmoe.kernels.catalog import CASES, GEMM_OPS, SHAPES, Case, Shape, op_of
from xmoe.kernels.launch import recording
from xmoe.kernels.report import Row, over_processes, violations
from xmoe.kernels.tuning import ARCHES
from xmoe.launch import cli

ROOT = Path(__file__).resolve().parents[2]
GFX = ("gfx90a", "gfx942", "gfx950")

# MFMA in units of 16x16x16 multiply-adds, of them and all other vector instructions of the K loop: 128x128, bfloat16.
SHARES = {
    "gfx90a": {"fused_forward": 0.82, "plain_forward": 0.86, "dgrad": 0.53, "wgrad": 0.42, "gathered_wgrad": 0.38},
    "gfx942": {"fused_forward": 0.88, "plain_forward": 0.90, "dgrad": 0.70, "wgrad": 0.60, "gathered_wgrad": 0.53},
    "gfx950": dict.fromkeys(GEMM_OPS, 0.80),
}
# With transposition inside threads, which was not run on an MI250X and therefore is a candidate only.
TRANSPOSED = [
    ("dgrad_two", "grouped_dgrad", {}, 0.64),
    ("dgrad_swiglu", "grouped_dgrad_activated", {}, 0.64),
    ("wgrad", "grouped_wgrad", {"blocks": {"BLOCK_ROWS": 64}, "num_warps": 8}, 0.54),
    ("wgrad_gather_x", "gathered_wgrad", {}, 0.46),
]
ROW_LOADS = ("gather", "combine", "row_dot", "activation_forward_swiglu", "activation_backward_swiglu")
ROW_STORES = ("gather", "combine", "activation_forward_swiglu", "activation_backward_swiglu")


def environment(cache: Path) -> dict[str, str]:
    """This process's, as of one that compiles; with a compiler cache of its own, so that nothing old is read."""
    return {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
    }


def compile_rows(wanted: Sequence[dict[str, Any]], cache: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_report.py"))]
    done = subprocess.run(
        command, input=json.dumps(list(wanted)), capture_output=True, text=True, env=environment(cache), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def default_rows() -> Iterator[dict[str, str]]:
    """What the default run compiles: a choice, as all of it takes minutes (``make soak``).

    Every case on gfx90a. The first case of each kernel also elsewhere: in bfloat16 on the other MI-series GPUs, for
    which figures are pinned, and on the other vendor's; GEMMs in float32, which has tiles of its own, and in float16.
    """
    seen: set[tuple[str, str]] = set()
    for case in CASES:
        new = kernels_of(case) - seen
        seen |= new
        for dtype, arches in _where(case, is_gemm=bool({op for _, op in new} & set(GEMM_OPS)), is_new=bool(new)):
            yield from ({"case": case.name, "arch": arch, "dtype": dtype} for arch in arches)


def _where(case: Case, *, is_gemm: bool, is_new: bool) -> list[tuple[str, tuple[str, ...]]]:
    default = case.dtypes[0]
    if not is_new:
        return [(default, ("gfx90a",))]
    if len(case.dtypes) == 1:
        return [(default, ("gfx90a", "sm_90"))]
    if is_gemm:
        return [("bfloat16", (*GFX, "sm_90")), ("float32", ("gfx90a",)), ("float16", ("sm_80",))]
    return [("bfloat16", ARCHES)]


def kernels_of(case: Case, *, shape: Shape = SHAPES[0], arch: str = "gfx90a") -> set[tuple[str, str]]:
    """The names of a case's kernels, each with the kind of work it does there."""
    with recording(arch) as calls:
        case.run(case.inputs(case.dtypes[0], shape))
    assert calls, case.name
    return {(call.kernel.__name__, op_of(call)) for call in calls}


@pytest.fixture(scope="module")
def rows(cache: Path) -> list[dict[str, Any]]:
    wanted = list(default_rows())
    found = compile_rows(wanted, cache)
    assert {(row["case"], row["arch"], row["dtype"]) for row in found} == {tuple(each.values()) for each in wanted}
    return found


def chosen(rows: Sequence[dict[str, Any]], **wanted: Any) -> Iterator[dict[str, Any]]:
    """Rows whose entries have the given values; never none."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert found, wanted
    return iter(found)


def label(row: dict[str, Any]) -> str:
    return f"{row['kernel']} ({row['case']}, {row['dtype']}, {row['shape']}) on {row['arch']}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestDefaults:
    def test_every_kernel_compiles(self, rows: list[dict[str, Any]]):
        assert [f"{label(row)}: {row['error']}" for row in rows if row["error"]] == []
        assert {row["arch"] for row in rows} == set(ARCHES)

    def test_nothing_breaks_a_limit(self, rows: list[dict[str, Any]]):
        assert [f"{label(row)} {finding}" for row in rows for finding in row["violations"]] == []

    def test_no_spills_no_scratch_and_lds_that_is_there(self, rows: list[dict[str, Any]]):
        for row in rows:
            figures = row["figures"]
            spilled = [figures[name] for name in ("vgpr_spills", "sgpr_spills", "scratch_bytes")]
            assert spilled == [0, 0, 0], label(row)
            if row["arch"] in ("gfx90a", "gfx942"):
                assert row["lds_bytes"] <= 65536, label(row)

    def test_waves(self, rows: list[dict[str, Any]]):
        for row in rows:
            if row["op"] in GEMM_OPS:
                assert row["waves"] >= 2, label(row)
            elif row["arch"] in GFX:
                assert row["waves"] == 8, label(row)

    @pytest.mark.parametrize("arch", GFX)
    @pytest.mark.parametrize("op", GEMM_OPS)
    def test_mfma_share(self, rows: list[dict[str, Any]], arch: str, op: str):
        for row in chosen(rows, arch=arch, op=op, dtype="bfloat16"):
            assert list(row["config"].values())[:2] == [128, 128], label(row)
            assert row["mfma_share"] >= SHARES[arch][op], label(row)
            assert row["figures"]["hot_loop"]["accvgpr_moves"] == 0, label(row)

    @pytest.mark.parametrize("arch", GFX)
    def test_operands_of_16_bits_are_loaded_16_bytes_at_a_time(self, rows: list[dict[str, Any]], arch: str):
        for op in GEMM_OPS:
            for row in chosen(rows, arch=arch, op=op):
                if row["dtype"] != "float32":
                    assert set(row["figures"]["hot_loop"]["loads"]) == {"16"}, label(row)

    @pytest.mark.parametrize("arch", ARCHES)
    def test_rows_move_16_bytes_at_a_time(self, rows: list[dict[str, Any]], arch: str):
        for case in ROW_LOADS:
            for row in chosen(rows, arch=arch, case=case):
                loads = dict(row["figures"]["loads"])
                assert loads.pop("16") >= 1, label(row)
                # The activations' weight of a row: all lanes load the same one, on gfx a scalar load.
                weight = {"4": 1} if case.startswith("activation") and arch not in GFX else {}
                assert loads == weight, label(row)
        for case in ROW_STORES:
            for row in chosen(rows, arch=arch, case=case):
                # Beside its rows the activation's backward stores a weight gradient, of one lane.
                narrow = {"4": 1} if case.startswith("activation_backward") else {}
                stores = dict(row["figures"]["stores"])
                assert stores.pop("16") >= 1, label(row)
                assert stores == narrow, label(row)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mfma_share_with_transposition_inside_threads(cache: Path):
    wanted = [
        dict(case=case, arch="gfx90a", dtype="bfloat16", op=op, candidate=True)
        | {"changes": {"knobs": {"use_in_thread_transpose": True}, **changes}}
        for case, op, changes, _share in TRANSPOSED
    ]
    shares = {case: share for case, _op, _changes, share in TRANSPOSED}
    found = compile_rows(wanted, cache)
    assert {row["case"] for row in found} == shares.keys()
    for row in found:
        assert row["config"]["use_in_thread_transpose"] is True
        assert row["violations"] == []
        assert row["mfma_share"] >= shares[row["case"]], row["case"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_configurations_that_break_limits_are_found(cache: Path):
    """Rows too long for the registers of one wave, and steps too long for LDS, which Triton compiles all the same."""
    rows_of_one_wave = {"blocks": {"BLOCK_D": 8192}, "num_warps": 1}
    planted = [
        dict(case="row_dot", arch="gfx942", dtype="bfloat16", op="row_dot", changes=rows_of_one_wave),
        dict(case="dgrad", arch="gfx942", dtype="bfloat16", op="grouped_dgrad", changes={"blocks": {"BLOCK_K": 256}}),
    ]
    found = compile_rows([{**each, "candidate": False} for each in planted], cache)
    findings = {row["case"]: " ".join(row["violations"]) for row in found}
    assert re.search(r"spills [1-9]\d* vector .*uses [1-9]\d* bytes of scratch", findings["row_dot"])
    assert "needs 131072 bytes of LDS, a workgroup has at most 65536" in findings["dgrad"]
    assert "runs 0 waves per SIMD, fewer than 2" in findings["dgrad"]


def jit_kernels() -> set[str]:
    """Names of all entry points in kernels/, read from the source."""
    found = set()
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and re.fullmatch(r"_\w+_kernel", node.name) and node.decorator_list:
                found.add(node.name)
    return found


def test_every_kernel_is_in_the_catalog():
    recorded = set()
    for case in CASES:
        found = kernels_of(case)
        recorded |= {kernel for kernel, _ in found}
        assert {op for _, op in found} <= {*GEMM_OPS, "row", "other"}
    assert recorded == jit_kernels()


def test_cases_are_named_once_and_cover_every_kind_of_work():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    ops = {op for case in CASES for _, op in kernels_of(case, shape=SHAPES[1], arch="gfx942")}
    assert ops == {*GEMM_OPS, "row", "other"}


def figures(**changes: Any) -> Figures:
    clean = dict(vgprs=128, agprs=0, sgprs=40, vgpr_spills=0, sgpr_spills=0, scratch_bytes=0)
    loop = HotLoop(matrix_instructions=64, matrix_units=64.0, vector_instructions=16, accvgpr_moves=0, loads={16: 8})
    return Figures(**{**clean, "loads": {16: 8, 4: 1}, "stores": {16: 1}, "hot_loop": loop, **changes})


def row(**changes: Any) -> Row:
    names = dict(kernel="grouped_dgrad", case="dgrad", op="dgrad", arch="gfx90a", dtype="bfloat16", shape="T1")
    return Row(**{**names, "config": {"BLOCK_M": 128}, "default": True, "figures": figures(), "waves": 2.0, **changes})


MOVES = HotLoop(matrix_instructions=64, matrix_units=64.0, vector_instructions=16, accvgpr_moves=3, loads={16: 8})


class TestViolations:
    def test_none(self):
        assert violations(row()) == []
        assert violations(row(lds_bytes=65536)) == []
        assert violations(row(arch="sm_90", lds_bytes=227 * 1024, figures=figures(hot_loop=None))) == []
        assert violations(row(op="row", waves=8.0, figures=figures(hot_loop=None))) == []

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (dict(figures=figures(vgpr_spills=2)), "spills 2 vector and 0 scalar registers"),
            (dict(figures=figures(sgpr_spills=1)), "spills 0 vector and 1 scalar registers"),
            (dict(figures=figures(scratch_bytes=4)), "uses 4 bytes of scratch"),
            (dict(lds_bytes=65537), "needs 65537 bytes of LDS, a workgroup has at most 65536"),
            (dict(arch="gfx950", lds_bytes=163841), "needs 163841 bytes of LDS, a workgroup has at most 163840"),
            (dict(arch="sm_80", lds_bytes=166913), "needs 166913 bytes of LDS, a workgroup has at most 166912"),
            (dict(waves=1.0), "runs 1 waves per SIMD, fewer than 2"),
            (dict(op="row", waves=7.0), "runs 7 waves per SIMD, fewer than 8"),
            (dict(op="other", waves=7.0), "runs 7 waves per SIMD, fewer than 8"),
            (dict(figures=figures(hot_loop=MOVES)), "moves 3 registers to and from AGPRs in the K loop"),
            (dict(figures=figures(hot_loop=None)), "has no loop with matrix instructions"),
            (dict(figures=None, error="CompilationError: no"), "does not compile: CompilationError: no"),
        ],
    )
    def test_each(self, changes: dict[str, Any], sentence: str):
        assert violations(row(**changes)) == [sentence]


def test_a_dead_process_is_one_finding_and_stops_nothing():
    found = over_processes(signal.raise_signal, [0, signal.SIGKILL, 0], jobs=1)
    assert sorted((int(item), died) for item, _result, died in found) == [(0, False), (0, False), (9, True)]


def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``xmoe kernels report ARGUMENTS`` in this process."""
    # Set first: only then does monkeypatch also undo what the command sets.
    for name in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["xmoe", "kernels", "report", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--arch", "gfx90a,gfx1100"], ["arch (gfx1100)", *ARCHES]),
        (["--dtype", "fp8"], ["dtype (fp8)", "bfloat16", "float16", "float32"]),
        (["--kernel", "nothing"], ["kernel (nothing)", "gather", "wgrad"]),
    ],
)
def test_a_mistake_is_one_line_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
):
    code, out, err = run_command(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts)


def planted(*rows: Row) -> Callable[..., Iterator[Any]]:
    """In the place of :func:`xmoe.kernels.report.run`: ``rows`` for the first task, none for the others."""

    def run(wanted: Sequence[Any], *, jobs: int) -> Iterator[Any]:
        for index, task in enumerate(wanted):
            yield task, list(rows) if index == 0 else []

    return run


def test_a_default_that_breaks_a_limit_ends_in_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    spills = row(case="planted", figures=figures(vgpr_spills=2))
    fails = row(case="broken", figures=None, error="CompilationError: at 1:2\n  [/x]\n")
    monkeypatch.setattr(report, "run", planted(row(), fails, spills, row(case="candidate", waves=1.0, default=False)))
    code, out, err = run_command(capsys, monkeypatch, "--kernel", "gather", "--picture", str(tmp_path / "map.png"))
    assert code == 1
    assert "planted" in out
    assert err.splitlines()[-2:] == [
        "grouped_dgrad (broken, bfloat16, T1) on gfx90a does not compile: CompilationError: at 1:2 [/x]",
        "grouped_dgrad (planted, bfloat16, T1) on gfx90a spills 2 vector and 0 scalar registers",
    ]
    assert "candidate" not in err
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_rows_within_the_limits_end_in_0(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "run", planted(row(), row(op="row", waves=8.0)))
    code, out, _err = run_command(capsys, monkeypatch, "--kernel", "gather", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    names = ("spills", "scratch_bytes", "lds_bytes", "waves_per_simd", "load_bytes_per_lane", "mfma_share")
    assert [line["metric"] for line in lines] == [f"kernel.{name}" for name in (*names, *names[:-1])]
    assert [line["value"] for line in lines] == [0, 0, 0, 2.0, 16, 0.8, 0, 0, 0, 8.0, 16]
    assert lines[0]["setting"]["config"] == {"BLOCK_M": 128}
    assert lines[0]["setting"]["default"] is True


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_whole_report_is_without_findings(cache: Path):
    """Every case, in each of its dtypes, on every architecture."""
    command = [str(Path(sys.executable).with_name("xmoe")), "kernels", "report", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    settings = [json.loads(line)["setting"] for line in done.stdout.splitlines()]
    found = {(setting["case"], setting["dtype"], setting["arch"]) for setting in settings}
    assert found == {(case.name, dtype, arch) for case in CASES for dtype in case.dtypes for arch in ARCHES}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_compiles_and_dumps_what_it_counted(tmp_path: Path, cache: Path):
    """With TRITON_INTERPRET set around it; the share is counted again from the dump, as the text has it."""
    command = [str(Path(sys.executable).with_name("xmoe")), "kernels", "report", "--arch", "gfx942", "--json"]
    command += ["--kernel", "forward_swiglu", "--dtype", "bf16", "--dump", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment(cache), "TRITON_INTERPRET": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if "forward_activated" in line]
    share = {line["metric"]: line["value"] for line in lines if line["setting"]["case"] == "forward_swiglu"}
    (dumped,) = tmp_path.glob("gfx942/grouped_forward_activated-forward_swiglu-bfloat16-*.amdgcn")
    assert share["kernel.mfma_share"] == pytest.approx(recounted_share(dumped.read_text(encoding="utf-8")), abs=1e-6)


def recounted_share(text: str) -> float:
    """W / (W + V) of the block with most matrix instructions that branches to itself."""
    blocks = re.split(r"^(?=\.LBB\d+_\d+:)", text, flags=re.MULTILINE)
    counts = []
    for block in blocks:
        name = block.partition(":")[0]
        body, branch, _ = block.partition(f" {name}\n")
        if branch:
            mnemonics = re.findall(r"^\t(v_\w+)", body, re.MULTILINE)
            matrix = [mnemonic for mnemonic in mnemonics if mnemonic == "v_mfma_f32_16x16x16_bf16"]
            counts.append((len(matrix), len(mnemonics)))
    matrix_count, vector_count = max(counts)
    assert matrix_count
    return matrix_count / vector_count
