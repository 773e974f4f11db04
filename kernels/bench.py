"""Times the kernels against torch on the device at hand, and relates what they reach to what the chip can do."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from .launch import arch_of, device_arch, recording
from .tuning import ARCHES, asking, triton_version
from .tuning_search import ROUNDS as TUNING_ROUNDS
from .tuning_search import Winner, tune

logger = logging.getLogger(__name__)

# Runs one callable on the device and returns the seconds it took.
Clock = Callable[[Callable[[], object]], float]
_ROUNDS = 20
# More than the last-level cache of every chip (256 MB on MI300X): a row read in the round before is not still there.
_FLUSH_BYTES = 512 * 2**20
# Root mean square of the error over that of the result: a few times what one rounding of the result costs.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a device can do at most; matrix FLOP/s by dtype, dense."""

    flops_per_s: dict[str, float]
    bandwidth_bytes_per_s: float


def _peak(*, sixteen_bit: float, fp32: float, terabytes: float) -> Peak:
    by_dtype = {"bfloat16": sixteen_bit * 1e12, "float16": sixteen_bit * 1e12, "float32": fp32 * 1e12}
    return Peak(flops_per_s=by_dtype, bandwidth_bytes_per_s=terabytes * 1e12)


# The vendors' data sheets, by a part of the device's name; the first that fits counts.
PEAKS = {
    # AMD Instinct MI250X data sheet, halved: a device is one of two dies. 383 and 95.7 TFLOP/s, 3.2 TB/s.
    "MI250X": _peak(sixteen_bit=191.5, fp32=47.9, terabytes=1.6),
    "MI300X": _peak(sixteen_bit=1307.4, fp32=163.4, terabytes=5.3),  # AMD Instinct MI300X data sheet
    "MI355X": _peak(sixteen_bit=2516.6, fp32=157.3, terabytes=8.0),  # AMD Instinct MI355X data sheet
    # NVIDIA A100 data sheet; fp32 without TF32, which the kernels do not use.
    "A100-SXM4-40GB": _peak(sixteen_bit=312, fp32=19.5, terabytes=1.555),
    "A100": _peak(sixteen_bit=312, fp32=19.5, terabytes=2.039),
    "H100 PCIe": _peak(sixteen_bit=756, fp32=51, terabytes=2.0),  # NVIDIA H100 data sheet, as are SXM's below
    "H100": _peak(sixteen_bit=989.4, fp32=66.9, terabytes=3.35),
    "H200": _peak(sixteen_bit=989.4, fp32=66.9, terabytes=4.8),  # NVIDIA H200 data sheet
}


def peak_of(device_name: str) -> Peak | None:
    """The limits of a device, or None where its name is not in :data:`PEAKS`."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel on one problem.

    ``run``       calls the launcher
    ``reference`` what ``run`` must return: the PyTorch twin's result
    ``baseline``  the same work by torch's own operators, or None where torch has none that fits
    ``inputs``    the tensors that the kernel reads
    ``compared``  the part of a result that means something
    """

    kernel: str
    shape: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    run: Callable[[], Any]
    reference: Callable[[], Any]
    baseline: Callable[[], Any] | None
    inputs: Sequence[Tensor]
    compared: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of the benchmark; times are percentiles over the rounds.

    ``moved_bytes``  each tensor read and written once: what no kernel can avoid, and what ``gb_per_s`` is made of
    ``share_of_*``   of the device's limits, None where they are unknown
    """

    kernel: str
    shape: dict[str, int]
    dtype: str
    device: str
    arch: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    torch_p50_ms: float | None
    flops: int
    moved_bytes: int
    tflop_per_s: float
    gb_per_s: float
    share_of_peak_flops: float | None
    share_of_peak_bandwidth: float | None
    torch: str
    triton: str


def find_device(command: str) -> torch.device:
    """The GPU that torch would use. Raises ValueError naming ``command`` where there is none."""
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}"
        raise ValueError(f"{command} times kernels on a GPU, and {build} sees none on this machine")
    return torch.device("cuda", torch.cuda.current_device())


def device_clock(device: torch.device) -> Clock:
    """Measures by the device's own events, each time with cold caches. Of a CPU, by the host's clock."""
    if device.type == "cpu":
        return _host_seconds
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds


def _host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_case(case: Case, *, clock: Clock | None = None, rounds: int = _ROUNDS) -> Timing:
    """Checks the kernel against its twin, then times it and torch's operators in turns.

    Raises RuntimeError where the kernel's result is not the twin's.
    """
    found = case.run()
    check_result(case.kernel, case.compared(found), case.compared(case.reference()))
    clock = clock or device_clock(case.device)
    baseline = _that_runs(case)
    kernel_s, torch_s = [], []
    for _ in range(rounds):
        kernel_s.append(clock(case.run))
        if baseline is not None:
            torch_s.append(clock(baseline))
    p20, p50, p80 = _percentiles(kernel_s)
    name = torch.cuda.get_device_name(case.device) if case.device.type == "cuda" else case.device.type
    peak = peak_of(name)
    dtype = str(case.dtype).removeprefix("torch.")
    flops, moved = flops_of(case), sum(x.nbytes for x in (*case.inputs, *tensors_in(found)))
    return Timing(
        kernel=case.kernel,
        shape=case.shape,
        dtype=dtype,
        device=name,
        arch=device_arch(case.device) if case.device.type == "cuda" else arch_of(case.inputs[0]),
        p20_ms=p20 * 1e3,
        p50_ms=p50 * 1e3,
        p80_ms=p80 * 1e3,
        torch_p50_ms=_percentiles(torch_s)[1] * 1e3 if torch_s else None,
        flops=flops,
        moved_bytes=moved,
        tflop_per_s=flops / p50 / 1e12,
        gb_per_s=moved / p50 / 1e9,
        share_of_peak_flops=flops / p50 / peak.flops_per_s[dtype] if peak and flops else None,
        share_of_peak_bandwidth=moved / p50 / peak.bandwidth_bytes_per_s if peak else None,
        torch=torch.__version__,
        triton=triton_version(),
    )


def check_result(kernel: str, found: Any, expected: Any) -> None:
    """Raises RuntimeError unless both hold the same tensors: integers equal, floats within a few roundings."""
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    for place, (one, other) in enumerate(pairs):
        if one.is_floating_point():
            error = (one.double() - other.double()).square().mean().sqrt()
            scale = other.double().square().mean().sqrt()
            wrong = bool(error > _TOLERANCE[one.dtype] * scale) or bool(error.isnan()) != bool(scale.isnan())
        else:
            wrong = not torch.equal(one, other)
        if wrong:
            raise RuntimeError(f"{kernel}: result {place} of {len(pairs)} is not that of the PyTorch twin: not timed")


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a launcher's result: one, a tuple with gaps, or a dataclass."""
    if isinstance(result, Tensor):
        return [result]
    parts = result if isinstance(result, tuple | list) else vars(result).values() if result is not None else ()
    return [x for x in parts if isinstance(x, Tensor)]


def flops_of(case: Case) -> int:
    """What the case's launches declare, without running them."""
    with recording(ARCHES[0]) as calls:
        case.run()
    return sum(call.cost.flops for call in calls)


def tune_case(case: Case, *, clock: Clock | None = None, rounds: int = TUNING_ROUNDS) -> list[Winner]:
    """Searches every kernel that the case launches; the winners are kept on disk."""
    clock = clock or device_clock(case.device)
    expected = case.compared(case.reference())

    def check() -> None:
        check_result(case.kernel, case.compared(case.run()), expected)

    with asking() as keys:
        check()
    return list(tune(keys, lambda: clock(case.run), check=check, rounds=rounds))


def _that_runs(case: Case) -> Callable[[], Any] | None:
    """The baseline, unless this torch cannot do it on this device."""
    if case.baseline is None:
        return None
    try:
        case.baseline()
    except (RuntimeError, AttributeError, ValueError) as error:
        logger.warning("%s: torch's own operators do not run here: %s", case.kernel, str(error).splitlines()[:1])
        return None
    return case.baseline


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th."""
    if len(seconds) == 1:
        return (seconds[0],) * 3
    fifths = quantiles(seconds, n=10, method="inclusive")
    return fifths[1], fifths[4], fifths[7]


def as_line(timing: Timing, **more: Any) -> str:
    """One JSON line."""
    return json.dumps({**asdict(timing), **more})
