"""The benchmark's own code, on tiny rows in the interpreter, with a clock that is given."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xmoe.kernels import bench, tuning_cache
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.bench import Case, Timing, as_line, check_result, find_device, peak_of, time_case, tune_case
from xmoe.kernels.bench_cases import CASES, Shape, cases_of
from xmoe.kernels.launch import counting
from xmoe.launch import cli

SHAPE = Shape(num_tokens=9, width=32, expert_width=16, num_experts=4, top_k=2)
CPU = torch.device("cpu")


def case_of(kernel: str, dtype: str = "float32") -> Case:
    (case,) = cases_of(SHAPE, dtype=dtype, device=CPU, only=[kernel])
    return case


class Clock:
    """Runs what it times, and says that each kernel took 2 ms and each baseline 3 ms."""

    def __init__(self, case: Case) -> None:
        self.case, self.order = case, ""

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.order += "k" if run == self.case.run else "t"
        return 2e-3 if run == self.case.run else 3e-3


@pytest.mark.parametrize("kernel", CASES)
def test_every_kernel_is_checked_and_timed(kernel: str) -> None:
    case = case_of(kernel, "bfloat16" if kernel in ("gather_rows", "grouped_wgrad") else "float32")
    clock = Clock(case)
    timing = time_case(case, clock=clock, rounds=1)
    assert clock.order == "kt"
    assert (timing.kernel, timing.device, timing.arch) == (kernel, "cpu", "interpreter")
    assert timing.p20_ms == timing.p50_ms == timing.p80_ms == pytest.approx(2.0)
    assert timing.torch_p50_ms == pytest.approx(3.0)
    assert timing.gb_per_s == pytest.approx(timing.moved_bytes / 2e-3 / 1e9)
    assert timing.tflop_per_s == pytest.approx(timing.flops / 2e-3 / 1e12)
    assert timing.share_of_peak_bandwidth is None
    assert json.loads(as_line(timing, xmoe="1"))["xmoe"] == "1"


def test_rounds_of_the_kernel_and_of_its_baseline_take_turns() -> None:
    case = case_of("gather_rows")
    clock = Clock(case)
    time_case(case, clock=clock, rounds=2)
    assert clock.order == "ktkt"


def test_every_launcher_that_launches_has_a_case() -> None:
    """Composed of others: the experts' MLP. Of a token's few scores only, in rare settings: the selections."""
    without = {
        "expert_mlp_forward",
        "expert_mlp_backward",
        "top_k_ids",
        "experts_of_best_groups",
        "ranks_within_expert",
    }
    assert set(CASES) - {"gathered_wgrad"} == set(kernels.__all__) - without


def test_work_is_that_of_the_routed_rows() -> None:
    rows, width, expert_width = 9 * 2, 32, 16
    timing = time_case(case_of("gathered_wgrad"), rounds=1)
    assert timing.flops == 2 * rows * width * expert_width
    weights = 4 * 4 * width * expert_width
    assert timing.moved_bytes == 4 * (rows * expert_width + 9 * width + rows) + weights
    assert time_case(case_of("gather_rows"), rounds=1).moved_bytes == 4 * (9 * width + rows + rows * width)


def test_a_wrong_kernel_is_not_timed() -> None:
    case = case_of("gather_rows")
    wrong = replace(case, run=lambda: case.run() * 1.001)
    with pytest.raises(RuntimeError, match="gather_rows: result 0 of 1 is not that of the PyTorch twin"):
        time_case(wrong, clock=Clock(wrong))


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (torch.ones(4), True),
        (torch.ones(4) + 1e-6, True),
        (torch.tensor([1.0, 1.0, 1.0, 1.0001]), False),
        (torch.full((4,), float("nan")), False),
    ],
)
def test_results_may_differ_by_roundings(found: torch.Tensor, right: bool) -> None:
    if right:
        check_result("one", (found, None), (torch.ones(4), None))
    else:
        with pytest.raises(RuntimeError, match="result 0"):
            check_result("one", found, torch.ones(4))


def test_integers_must_be_equal() -> None:
    check_result("one", torch.arange(3), torch.arange(3))
    with pytest.raises(RuntimeError, match="result 1 of 2"):
        check_result("one", (torch.ones(2), torch.arange(3)), (torch.ones(2), torch.arange(3).flip(0)))


def test_without_an_operator_of_torchs_the_kernel_is_timed_alone(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> None:
        raise RuntimeError("grouped gemm is not supported on this device")

    case = replace(case_of("gather_rows"), baseline=missing)
    clock = Clock(case)
    with caplog.at_level(logging.WARNING):
        assert time_case(case, clock=clock, rounds=2).torch_p50_ms is None
    assert clock.order == "kk"
    assert "grouped gemm is not supported" in caplog.text


def test_shares_are_of_the_devices_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = bench.Peak(flops_per_s={"float32": 1e9}, bandwidth_bytes_per_s=1e7)
    monkeypatch.setitem(bench.PEAKS, "cpu", limits)
    case = case_of("grouped_wgrad")
    timing = time_case(case, clock=Clock(case), rounds=1)
    assert timing.share_of_peak_flops == pytest.approx(timing.flops / 2e-3 / 1e9)
    assert timing.share_of_peak_bandwidth == pytest.approx(timing.moved_bytes / 2e-3 / 1e7)
    case = case_of("gather_rows")
    assert time_case(case, clock=Clock(case), rounds=1).share_of_peak_flops is None


@pytest.mark.parametrize(
    ("name", "tflop_per_s", "terabytes"),
    [
        ("AMD Instinct MI250X", 191.5, 1.6),
        ("AMD Instinct MI300X", 1307.4, 5.3),
        ("AMD Instinct MI355X", 2516.6, 8.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H200", 989.4, 4.8),
    ],
)
def test_limits_are_found_by_the_devices_name(name: str, tflop_per_s: float, terabytes: float) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.flops_per_s["bfloat16"] == pytest.approx(tflop_per_s * 1e12)
    assert peak.bandwidth_bytes_per_s == pytest.approx(terabytes * 1e12)
    assert peak_of("AMD Radeon") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dtype="float64"), "dtype (float64) must be one of bfloat16, float16, float32"),
        (dict(only=["gemm"]), "kernel gemm is not one of gate_forward"),
        (dict(shape=replace(SHAPE, top_k=5)), "top_k (5) must not exceed the number of experts (4)"),
    ],
)
def test_a_mistake_is_a_value_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is compared below)
        list(cases_of(**{"shape": SHAPE, "dtype": "float32", "device": CPU, **arguments}))
    assert message in str(caught.value)


def test_tuning_a_case_keeps_a_winner_for_each_kernel_it_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    case = case_of("sort_slots")
    winners = tune_case(case, clock=Clock(case), rounds=1)
    assert [winner.key.op for winner in winners] == ["plan", "plan_offsets"]
    for winner in winners:
        assert winner.found.seconds == winner.default_seconds == 2e-3
        assert tuning_cache.find(winner.key) is not None


# The command line


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands take the CPU, and with it the interpreter, for a GPU."""
    monkeypatch.setattr(bench, "find_device", lambda command: CPU)
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["xmoe", "kernels", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


SIZES = dict(tokens=9, width=16, expert_width=16, experts=4, top_k=2, dtype="float32", only="gather_rows")
ARGUMENTS = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.usefixtures("on_a_cpu")
def test_bench_prints_one_json_line_a_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "bench", *ARGUMENTS, "--json")
    assert code == 0
    (line,) = [json.loads(line) for line in out.splitlines()]
    assert line["kernel"] == "gather_rows"
    assert line["shape"]["num_tokens"] == 9
    assert {*Timing.__dataclass_fields__, "xmoe"} == line.keys()


@pytest.mark.usefixtures("on_a_cpu")
def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "bench", *ARGUMENTS)
    assert code == 0
    assert "gather_rows" in out
    assert "speed-up" in out


@pytest.mark.usefixtures("on_a_cpu")
def test_tune_says_what_won_and_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, monkeypatch, "tune", *ARGUMENTS)
    assert code == 0
    assert "gather_rows gather float32 rows<=32: " in out
    assert "1.00 times the default's speed, of 1: BLOCK_D=16" in out
    assert f"winners are in {tmp_path / 'tuning'}" in out
    assert len(list(tmp_path.rglob("*.json"))) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path / "file"))
    code, _, err = run(capsys, monkeypatch, "tune", *ARGUMENTS)
    assert code == 2
    assert "XMOE_CACHE_DIR" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_a_gpu_the_commands_say_so(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, command)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: xmoe kernels {command} times kernels on a GPU")
    assert err.count("\n") == 1
    with pytest.raises(ValueError, match="sees none"):
        find_device("xmoe")


def test_the_clock_of_a_cpu_measures_and_launches_once() -> None:
    case = case_of("gather_rows")
    with counting() as counts:
        assert bench.device_clock(CPU)(case.run) > 0
    assert counts == {"gather_rows": 1}
