"""Reads the PTX text that Triton's NVIDIA backend writes, and the resources of the machine code made from it."""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs

from .control_flow import Access, Instruction, Program

_LABEL = re.compile(r"^\s*([\w$]+):(?!:)")
_STATEMENT = re.compile(r"^(?P<predicate>@!?%\w+\s+)?(?P<mnemonic>[a-z][\w.:]*)\s*(?P<operands>.*)$", re.DOTALL)
_REGISTER = re.compile(r"%\w+")
_MATRIX = re.compile(r"^(?:wg)?mma\..*\.m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)\.")
_MEMORY = re.compile(r"^(?P<kind>ld|st)\.global(?:\.[\w:]+)*?(?:\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)$")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) .*?LOCAL:(?P<local>\d+)")
_NO_RESULT = (
    "st.",
    "setp",
    "bar.",
    "fence",
    "mbarrier",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
    "cp.async.commit",
)


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory it has (for a kernel without arrays, of spilled registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse_resources(text)


def parse_resources(text: str) -> tuple[int, int]:
    """The same from the text that ``cuobjdump`` writes.

    Example: ``REG:84 STACK:0 SHARED:1024 LOCAL:0 ...`` gives 84 and 0.
    """
    found = _USAGE.search(text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text.strip()!r}")
    return int(found["registers"]), int(found["stack"]) + int(found["local"])


def read_program(text: str) -> Program:
    """Instructions and labels of the one kernel in ``text``."""
    _, _, body = text.partition(".entry")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        code = line.partition("//")[0]
        if found := _LABEL.match(code):
            labels[found[1]] = len(instructions)
            code = code[found.end() :]
        # Inline assembly may hold several statements in one line, and braces of its own.
        for statement in code.split(";"):
            if match := _STATEMENT.match(re.sub(r"^[\s{]+(?![\s%])|^\s+", "", statement)):
                instructions.append(_instruction(match["mnemonic"], match["operands"], bool(match["predicate"])))
    return Program(instructions=instructions, labels=labels)


def _instruction(mnemonic: str, operands: str, predicated: bool) -> Instruction:
    if mnemonic.split(".")[0] == "bra":
        return Instruction(mnemonic=mnemonic, target=operands.strip(), falls_through=predicated)
    if mnemonic in ("ret", "exit"):
        return Instruction(mnemonic=mnemonic, falls_through=predicated)
    if mnemonic.startswith("cp.async.c"):
        return _copy(mnemonic, operands)
    first, rest = _split_result(operands)
    memory = _MEMORY.match(mnemonic)
    access = None
    if memory is not None:
        num_bytes = int(memory["count"] or 1) * int(memory["bits"]) // 8
        address = frozenset(_REGISTER.findall(" ".join(_BRACKETS.findall(operands))))
        access = Access(kind="load" if memory["kind"] == "ld" else "store", bytes_per_lane=num_bytes, address=address)
    if mnemonic.startswith(_NO_RESULT):
        return Instruction(mnemonic=mnemonic, reads=frozenset(_REGISTER.findall(operands)), access=access)
    matrix = _MATRIX.match(mnemonic)
    return Instruction(
        mnemonic=mnemonic,
        writes=frozenset(_REGISTER.findall(first)),
        reads=frozenset(_REGISTER.findall(rest)),
        access=access,
        multiply_adds=int(matrix["m"]) * int(matrix["n"]) * int(matrix["k"]) if matrix else 0,
    )


def _copy(mnemonic: str, operands: str) -> Instruction:
    """``cp.async.cg.shared.global [to], [from], 16, ...``: global memory to shared memory, past the registers."""
    if not (brackets := _BRACKETS.findall(operands)) or ".global" not in mnemonic:
        return Instruction(mnemonic=mnemonic)
    address = frozenset(_REGISTER.findall(brackets[1]))
    num_bytes = int(operands.rpartition("]")[2].split(",")[1], base=0)
    access = Access(kind="load", bytes_per_lane=num_bytes, address=address)
    return Instruction(mnemonic=mnemonic, reads=address, access=access)


def _split_result(operands: str) -> tuple[str, str]:
    """The first operand, which may be a list in braces, and what follows."""
    operands = operands.strip()
    first, separator, rest = operands.partition("}" if operands.startswith("{") else ",")
    return first + separator, rest
