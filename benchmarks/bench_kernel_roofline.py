"""Where each kernel stands on the rooflines of one MI250X die and one MI300X: predictions, nothing is timed.

    python benchmarks/bench_kernel_roofline.py [--json] [--picture FILE.png]

A kernel's intensity is its FLOPs over the bytes that it cannot avoid: every operand read and every result written
once, gathered rows once for each token. It is bound by memory where that is below the chip's balance (peak matrix
FLOP/s over memory bandwidth), and its shortest time is the larger of the two quotients. ``xmoe kernels bench`` on a
machine with a GPU times the kernels and relates them to the same limits.

Figures of the metrics, one for each kernel, shape and chip:

    roofline.intensity_flop_per_byte
    roofline.balance_share             intensity over the chip's balance; below 1 memory is the limit
    roofline.shortest_time_s           predicted
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from common import Result, fail, report, versions

try:
    from xmoe.kernels.bench import PEAKS, Peak
    from xmoe.kernels.catalog import SHAPES, Shape
except ModuleNotFoundError as error:
    fail(f"the benchmark needs the package {error.name!r}: pip install -r requirements/test.txt")

CHIPS = {"MI250X die": PEAKS["MI250X"], "MI300X": PEAKS["MI300X"]}
ITEM_BYTES = 2  # bfloat16
FP32_BYTES = 4


def work(shape: Shape) -> dict[str, tuple[float, float]]:
    """FLOPs and unavoidable bytes of each kernel of one SwiGLU layer, forward and backward, all experts on one die."""
    assignments = shape.tokens * shape.top_k
    tokens_D = shape.tokens * shape.width * ITEM_BYTES
    rows_D = assignments * shape.width * ITEM_BYTES
    rows_F = assignments * shape.expert_width * ITEM_BYTES
    matrices = shape.experts * shape.expert_width * shape.width * ITEM_BYTES
    product = 2.0 * assignments * shape.expert_width * shape.width
    numbers = FP32_BYTES * assignments
    return {
        "gate_forward": (5.0 * shape.tokens * shape.experts, FP32_BYTES * shape.tokens * shape.experts + 2 * numbers),
        "sort_slots": (0.0, 3 * numbers),
        "gather_rows": (0.0, tokens_D + rows_D + numbers),
        "grouped_forward_activated": (2 * product, tokens_D + 2 * matrices + 3 * rows_F + 2 * numbers),
        "grouped_forward": (product, rows_F + matrices + rows_D),
        "combine_rows": (assignments * shape.width, rows_D + tokens_D + numbers),
        "grouped_dgrad_activated": (product, tokens_D + matrices + 5 * rows_F + 3 * numbers),
        "grouped_dgrad": (2 * product, 2 * rows_F + 2 * matrices + rows_D),
        "grouped_wgrad (gathered)": (product, tokens_D + rows_F + matrices + numbers),
        "activation_forward": (5.0 * assignments * shape.expert_width, 3 * rows_F + numbers),
        "activation_backward": (15.0 * assignments * shape.expert_width, 6 * rows_F + 2 * numbers),
        "row_dot": (2.0 * assignments * shape.width, rows_D + tokens_D + 2 * numbers),
    }


def balance(peak: Peak) -> float:
    """FLOPs in bfloat16 in the time of one byte."""
    return peak.flops_per_s["bfloat16"] / peak.bandwidth_bytes_per_s


def shortest_time_s(flops: float, moved_bytes: float, peak: Peak) -> float:
    return max(flops / peak.flops_per_s["bfloat16"], moved_bytes / peak.bandwidth_bytes_per_s)


def results() -> list[Result]:
    found = []
    for shape in SHAPES:
        for kernel, (flops, moved_bytes) in work(shape).items():
            intensity = flops / moved_bytes
            setting = {"kernel": kernel, "shape": str(shape), "dtype": "bfloat16", "predicted": True}
            found.append(
                Result(
                    metric="roofline.intensity_flop_per_byte",
                    value=intensity,
                    unit="FLOP/B",
                    better="higher",
                    setting=setting,
                )
            )
            figures: dict[str, tuple[Callable[[Peak], float], str, str]] = {
                "balance_share": (lambda peak, of=intensity: of / balance(peak), "", "higher"),
                "shortest_time_s": (lambda peak, of=(flops, moved_bytes): shortest_time_s(*of, peak), "s", "lower"),
            }
            for name, (figure, unit, better) in figures.items():
                found += [
                    Result(
                        metric=f"roofline.{name}",
                        value=figure(peak),
                        unit=unit,
                        better=better,  # type: ignore[arg-type]
                        setting={**setting, "chip": chip},
                    )
                    for chip, peak in CHIPS.items()
                ]
    return found


def draw(path: Path) -> None:
    """The two roofs, and every kernel's place below them for both shapes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    x = np.geomspace(0.1, 2000, 200)
    for (chip, peak), colour in zip(CHIPS.items(), ("tab:blue", "tab:red"), strict=True):
        roof = np.minimum(peak.flops_per_s["bfloat16"], x * peak.bandwidth_bytes_per_s) / 1e12
        axes.plot(x, roof, color=colour, label=f"{chip}: balance {balance(peak):.0f} FLOP/B")
        for shape, marker in zip(SHAPES, ("o", "^"), strict=True):
            for flops, moved_bytes in work(shape).values():
                if flops:
                    y = flops / shortest_time_s(flops, moved_bytes, peak) / 1e12
                    axes.plot(flops / moved_bytes, y, marker, color=colour, markersize=5)
    offsets = {}
    for kernel, (flops, moved_bytes) in work(SHAPES[0]).items():
        if flops:
            offsets[kernel] = flops / moved_bytes
    low = 0.12
    for number, (kernel, place) in enumerate(sorted(offsets.items(), key=lambda item: item[1])):
        height = low * 1.6 ** (number % 6)
        axes.axvline(place, ymax=0.33, color="grey", linewidth=0.5, linestyle=":")
        axes.text(place, height, kernel, fontsize=7, ha="right" if place > 100 else "left")
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s at most", ylim=(0.1, 3e3)
    )
    axes.set_title(f"Predicted limits, bfloat16. Circles: {SHAPES[0]}; triangles: {SHAPES[1]}", fontsize=10)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--picture", type=Path, help="write the roofline diagram to this PNG file")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw(arguments.picture)
    report(results(), as_json=arguments.json, used=versions("torch", "triton"), title="Rooflines (predicted)")


if __name__ == "__main__":
    main()
