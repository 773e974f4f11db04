"""Addresses are 64 bits wide: a check over the kernels' source, and violations that it must find."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from address_rules import find_narrow_addresses, jit_functions, kernel_sources, masked_loads_without_other

KERNELS = Path(__file__).parents[2] / "kernels"

# Products of 32 bits that are numbers of rows or of tiles, not offsets of elements: all int32 in this package, and
# fewer than 2^31 as T * K is.
NUMBERS = {
    "row_tiles * column_tiles": "tiles of one launch",
    "num_row_tiles * num_column_tiles": "tiles of one launch",
    "num_experts * out_tiles": "tiles of one launch",
    "num_experts * out_tiles * in_tiles": "tiles of one launch",
    "part * part_tokens": "a token's number",
}


def narrow(text: str) -> list[str]:
    return find_narrow_addresses(jit_functions({"planted.py": textwrap.dedent(text)}))


def is_number(finding: str) -> bool:
    return any(f": {product} is not" in finding for product in NUMBERS)


def test_every_address_in_the_kernels_is_64_bits_wide():
    functions = jit_functions(kernel_sources(KERNELS))
    findings = find_narrow_addresses(functions)
    wrong = [finding for finding in findings if not is_number(finding)]
    assert not wrong, "\n" + "\n".join(wrong)
    unused = [product for product in NUMBERS if not any(f": {product} is not" in finding for finding in findings)]
    assert not unused, f"no longer in an address: {unused}"


def without_each_cast(text: str) -> Iterator[tuple[str, str]]:
    """(a cast to int64, the text with it removed) for each."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("tl.cast(") and "tl.int64" in ast.unparse(node):
            cast, value = ast.get_source_segment(text, node), ast.get_source_segment(text, node.args[0])
            assert cast
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            yield cast, f"{text[:start]}({value}){text[start + len(cast) :]}"


@pytest.mark.parametrize("file", ["rows.py", "activation.py", "plan.py"])
def test_each_cast_of_the_kernels_is_missed_when_removed(file: str):
    sources = kernel_sources(KERNELS)
    others = {name: text for name, text in sources.items() if name == "activation_math.py"}
    casts = list(without_each_cast(sources[file]))
    assert casts
    for cast, text in casts:
        assert find_narrow_addresses(jit_functions({**others, file: text})), f"{file} does not need {cast}"


def test_every_masked_load_of_the_kernels_gives_other():
    wrong = list(masked_loads_without_other(jit_functions(kernel_sources(KERNELS))))
    assert not wrong, "\n" + "\n".join(wrong)


HEAD = """
    @triton.jit
    def _planted_kernel(x, ids, out, width, depth, size, BLOCK: tl.constexpr):
        pid = tl.program_id(0)
        row = tl.cast(pid, tl.int64)
        columns = tl.arange(0, BLOCK)
"""


@pytest.mark.parametrize(
    ("body", "product"),
    [
        pytest.param("tl.load(x + pid * width + columns)", "pid * width", id="program-id"),
        pytest.param("tl.store(out + width * tl.num_programs(0), 0)", "width * tl.num_programs(0)", id="store"),
        pytest.param("tl.atomic_add(out + pid * width, 1)", "pid * width", id="atomic"),
        pytest.param("offset = pid * width\np = x + offset\ntl.load(p + columns)", "pid * width", id="variables"),
        pytest.param("tl.load(x + tl.cast(pid * width, tl.int64))", "pid * width", id="cast-too-late"),
        pytest.param(
            "tl.load(x + (pid * BLOCK + columns) * width)", "(pid * BLOCK + columns) * width", id="block-of-rows"
        ),
        pytest.param("tl.load(x + tl.load(ids + pid) * width)", "tl.load(ids + pid) * width", id="loaded"),
        pytest.param("tl.load(x + (tl.load(ids) // depth)[:, None] * width)", "* width", id="loaded-and-divided"),
        pytest.param("for i in range(size):\n    tl.load(x + i * width)", "i * width", id="loop-variable"),
        pytest.param(
            "for i in range(size):\n    tl.load(x)\n    x = x + i * width", "i * width", id="pointer-in-a-loop"
        ),
        pytest.param(
            "o = columns\nfor i in range(size):\n    tl.load(x + o)\n    o += width",
            "o += width",
            id="offset-that-grows",
        ),
        pytest.param("tl.load(x + columns * width * depth)", "columns * width * depth", id="tile-by-size"),
        pytest.param("tl.load(x + size * width + columns)", "size * width", id="sizes"),
        pytest.param("tl.load(x + row * width + pid * depth)", "pid * depth", id="one-of-two"),
        pytest.param("r = row\nif BLOCK > 4:\n    r = pid\ntl.load(x + r * width)", "r * width", id="one-branch"),
        pytest.param("tl.load(x + tl.where(pid > 0, pid, 0) * width)", "* width", id="where"),
        pytest.param("tl.load(x + row.to(tl.int32) * width)", "row.to(tl.int32) * width", id="narrowed"),
        pytest.param("tl.load(x + tl.cumsum(columns, 0) * width)", "tl.cumsum(columns, 0) * width", id="scan"),
        pytest.param("a, b = pid // size, pid % size\ntl.load(x + b * width + a)", "b * width", id="tuple"),
        pytest.param("tl.load(x + (pid << width))", "pid << width", id="shift"),
        pytest.param("tl.load(_row(x, pid, width))", "index * step", id="helper"),
        pytest.param("tl.load(_row(step=width, index=tl.load(ids), base=x))", "index * step", id="helper-by-name"),
        pytest.param("tl.load(x + _first(pid) * width)", "_first(pid) * width", id="helper-result"),
    ],
)
def test_a_planted_narrow_product_is_found(body: str, product: str):
    helpers = """
    @triton.jit
    def _row(base, index, step):
        return base + index * step

    @triton.jit
    def _first(program):
        return program % 1000 * 2 if program > 3 else program
    """
    text = textwrap.dedent(helpers) + textwrap.dedent(HEAD) + textwrap.indent(body, "    ")
    findings = narrow(text)
    assert findings
    assert all(f"{product} is not 64 bits wide" in finding for finding in findings)
    assert all(finding.startswith("planted.py, line ") for finding in findings)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("tl.load(x + row * width + columns)", id="cast"),
        pytest.param("tl.load(x + (row * BLOCK + columns)[:, None] * width + columns[None, :])", id="cast-of-a-part"),
        pytest.param("tl.load(x + columns[:, None] * width + columns[None, :])", id="in-tile"),
        pytest.param("tl.load(x + pid * BLOCK + columns)", id="block-of-columns"),
        pytest.param("tl.load(x + tl.minimum(columns, size - 1) * width)", id="clamped-in-tile"),
        pytest.param("tl.load(x + (pid % BLOCK) * width)", id="modulo-block"),
        pytest.param("for i in range(size):\n    tl.load(x + columns)\n    x += BLOCK * width", id="moving-pointer"),
        pytest.param("for i in range(size):\n    tl.load(x + row * width)\n    row += BLOCK", id="wide-in-a-loop"),
        pytest.param(
            "expert = tl.cast(tl.load(ids + pid), tl.int64)\ntl.load(x + expert * width)", id="loaded-and-cast"
        ),
        pytest.param("inside = pid * width < size\ntl.load(x + columns, mask=inside, other=0)", id="mask"),
        pytest.param("tl.store(out + row, pid * width)", id="stored-value"),
        pytest.param("tl.load(_row(x, row, width))", id="helper"),
    ],
)
def test_wide_and_bounded_products_pass(body: str):
    helper = "@triton.jit\ndef _row(base, index, step):\n    return base + index * step\n"
    assert narrow(helper + textwrap.dedent(HEAD) + textwrap.indent(body, "    ")) == []


def test_a_planted_masked_load_without_other_is_found():
    text = HEAD + "        tl.load(x, mask=columns < size)\n        tl.load(x, columns < size, 0)\n        tl.load(x)\n"
    found = list(masked_loads_without_other(jit_functions({"planted.py": textwrap.dedent(text)})))
    assert len(found) == 1
    assert "tl.load(x, mask=columns < size) has a mask" in found[0]
