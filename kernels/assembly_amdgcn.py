"""Reads the amdgcn text that Triton's AMD backend writes: instructions, and the metadata at its end."""

from __future__ import annotations

import re

from .control_flow import Access, Instruction, Program

_LABEL = re.compile(r"^([\w.$]+):")
_REGISTER = re.compile(r"\b([vsa])(?:(\d+)|\[(\d+):(\d+)\])(?!\w)")
_MATRIX = re.compile(r"^v_mfma_(?:scale_)?(?P<out>[a-z]+\d+)_\d+x\d+x(?P<k>\d+)")
_MEMORY = re.compile(r"^(?:global|flat|buffer)_(?P<kind>load|store)_(?P<lds>lds_)?(?P<size>\w+)$")
_METADATA = re.compile(r"^\s+(?:- )?\.(\w+):\s+(\d+)\s*$", re.MULTILINE)
_LANES = 64
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short": 2, "ushort": 2, "sshort": 2}
_BYTES |= {"byte": 1, "ubyte": 1, "sbyte": 1}
_NO_RESULT = ("s_cmp_", "s_bitcmp", "v_cmp", "s_cbranch", "s_branch", "ds_write", "s_waitcnt", "s_barrier")


def read_metadata(text: str) -> dict[str, int]:
    """Numbers of the kernel's metadata by name, such as ``vgpr_count`` (which includes the AGPRs).

    Example: a line ``.vgpr_spill_count: 3`` gives ``{"vgpr_spill_count": 3}``.
    """
    _, _, metadata = text.partition("amdhsa.kernels:")
    return {name: int(number) for name, number in _METADATA.findall(metadata)}


def read_program(text: str) -> Program:
    """Instructions and labels from the kernel's first line to its ``.Lfunc_end``."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        code, _, comment = line.partition(";")
        if found := _LABEL.match(code):
            if found[1].startswith(".Lfunc_end"):
                break
            labels[found[1]] = len(instructions)
            code = code[found.end() :]
        mnemonic, _, operands = code.strip().partition(" ")
        if mnemonic and mnemonic[0].isalpha():
            instructions.append(_instruction(mnemonic, operands.strip(), comment))
    return Program(instructions=instructions, labels=labels)


def _instruction(mnemonic: str, operands: str, comment: str) -> Instruction:
    if mnemonic.startswith(("s_branch", "s_cbranch")):
        return Instruction(mnemonic=mnemonic, target=operands, falls_through=mnemonic != "s_branch")
    if mnemonic in ("s_endpgm", "s_setpc_b64"):
        return Instruction(mnemonic=mnemonic, falls_through=False)
    parts = operands.split(", ")
    access = _access(mnemonic, parts, comment)
    if access is not None and access.kind == "store":
        return Instruction(mnemonic=mnemonic, reads=_registers(operands), access=access)
    if access is not None and _to_lds(mnemonic, operands):
        return Instruction(mnemonic=mnemonic, reads=access.address, access=access)
    if mnemonic.startswith(_NO_RESULT):
        return Instruction(mnemonic=mnemonic, reads=_registers(operands))
    return Instruction(
        mnemonic=mnemonic,
        writes=_registers(parts[0]),
        reads=_registers(", ".join(parts[1:])),
        access=access,
        multiply_adds=_multiply_adds(mnemonic, parts[0]),
    )


def _access(mnemonic: str, parts: list[str], comment: str) -> Access | None:
    """What an instruction moves between lanes (or LDS) and global memory. Spills go to scratch, which is not that."""
    found = _MEMORY.match(mnemonic)
    if found is None or "Folded" in comment:
        return None
    # Half registers: the d16 forms load into, or store from, the low or high half.
    size = found["size"].removesuffix("_hi").removesuffix("_d16")
    if size not in _BYTES:
        return None
    is_load = found["kind"] == "load"
    if mnemonic.startswith("buffer"):
        # ``data, offset, descriptor, offset``; with ``lds`` the data are left out.
        addresses = parts if _to_lds(mnemonic, ", ".join(parts)) else parts[1:]
    elif found["lds"]:
        addresses = parts
    else:
        addresses = parts[1:] if is_load else [parts[0], *parts[2:]]
    return Access(kind="load" if is_load else "store", bytes_per_lane=_BYTES[size], address=_registers(*addresses))


def _to_lds(mnemonic: str, operands: str) -> bool:
    return "_lds_" in mnemonic or "lds" in operands.split()


def _multiply_adds(mnemonic: str, result: str) -> int:
    """M * N * K of a matrix instruction times the blocks that it works on, 0 for another instruction.

    Names of gfx90a leave the blocks out. The result's registers have them: a lane holds M * N * blocks / 64 elements.

    Example: ``v_mfma_f32_4x4x4f16 a[0:3], ...`` gives 64 * 4 * 4 = 1024, that is 16 blocks of 4x4x4.
    """
    found = _MATRIX.match(mnemonic)
    if found is None:
        return 0
    elements = len(_registers(result)) // (2 if found["out"] == "f64" else 1) * _LANES
    return elements * int(found["k"])


def _registers(*operands: str) -> frozenset[str]:
    """Single registers: ``v[4:5]`` gives v4 and v5."""
    found = set()
    for kind, one, first, last in _REGISTER.findall(" ".join(operands)):
        numbers = [int(one)] if one else range(int(first), int(last) + 1)
        found.update(f"{kind}{number}" for number in numbers)
    return frozenset(found)
