"""Basic blocks and loops of a compiled kernel, and which of its loads feed addresses; the same for every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Access:
    """One load from or store to global memory.

    ``bytes_per_lane``  bytes that each lane moves
    ``address``         registers that address it
    """

    kind: Literal["load", "store"]
    bytes_per_lane: int
    address: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction, as far as the report looks at it.

    ``writes``, ``reads``  registers through which values flow; predicates and conditions are left out
    ``multiply_adds``      of a matrix instruction, of all lanes together; 0 elsewhere
    ``target``             label of a branch
    ``falls_through``      whether the next instruction can follow
    """

    mnemonic: str
    writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    access: Access | None = None
    multiply_adds: int = 0
    target: str | None = None
    falls_through: bool = True


@dataclass(frozen=True, kw_only=True)
class Program:
    """Instructions of one kernel in their order. ``labels`` gives the index of the instruction that follows each."""

    instructions: Sequence[Instruction]
    labels: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A natural loop: every instruction that can come between two visits of its first one, ``header``."""

    header: int
    members: frozenset[int]


def find_loops(program: Program) -> list[Loop]:
    """Natural loops, those of one header merged. Code that nothing reaches makes none.

    Example: ``x: add; branch x; end`` has one loop, of the first two instructions.
    """
    starts, successors = _blocks(program)
    ends = [*starts[1:], len(program.instructions)]
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, following in enumerate(successors):
        for next_block in following:
            predecessors[next_block].append(block)
    dominators = _dominators(successors, predecessors)
    bodies: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for header in following:
            if dominators[block] >> header & 1:
                bodies.setdefault(header, {header}).update(_body(block, header, predecessors))
    return [
        Loop(header=starts[header], members=frozenset(i for b in body for i in range(starts[b], ends[b])))
        for header, body in bodies.items()
    ]


def _blocks(program: Program) -> tuple[list[int], list[list[int]]]:
    """First instruction of each basic block, and the blocks that can follow each."""
    count = len(program.instructions)
    leaders = {0, *program.labels.values()}
    for index, instruction in enumerate(program.instructions):
        if instruction.target is not None or not instruction.falls_through:
            leaders.add(index + 1)
    starts = sorted(leader for leader in leaders if leader < count)
    number = {start: block for block, start in enumerate(starts)}
    successors = []
    for end in [*starts[1:], count][: len(starts)]:
        last = program.instructions[end - 1]
        following = [program.labels[last.target]] if last.target is not None else []
        following += [end] if last.falls_through else []
        successors.append([number[index] for index in following if index < count])
    return starts, successors


def _dominators(successors: list[list[int]], predecessors: list[list[int]]) -> list[int]:
    """Bit ``d`` of entry ``b`` is set where every path from block 0 to ``b`` visits ``d``; 0 for unreached blocks."""
    found = [0] * len(successors)
    order = _reverse_postorder(successors)
    for block in order:
        found[block] = (1 << len(successors)) - 1 if block else 1
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = -1
            for before in predecessors[block]:
                known &= found[before] or -1
            known |= 1 << block
            changed |= known != found[block]
            found[block] = known
    return found


def _reverse_postorder(successors: list[list[int]]) -> list[int]:
    """Blocks reached from block 0, it first."""
    if not successors:
        return []
    order: list[int] = []
    seen, stack = {0}, [(0, iter(successors[0]))]
    while stack:
        block, following = stack[-1]
        next_block = next((candidate for candidate in following if candidate not in seen), None)
        if next_block is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(next_block)
            stack.append((next_block, iter(successors[next_block])))
    return order[::-1]


def _body(block: int, header: int, predecessors: list[list[int]]) -> set[int]:
    """Blocks from which ``block`` is reached without a visit to ``header``, which dominates it."""
    found, waiting = {header}, [block]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += predecessors[current]
    return found


def data_loads(code: Sequence[Instruction], *, loops: bool) -> list[int]:
    """Bytes per lane of each load from global memory whose value ends in no address: of data, not of row indices.

    A loaded value is followed through registers to the end of ``code``, and where ``code`` loops once more around
    it: a pipelined loop uses in its next turn what it loads in this one.

    Example: ``v1 = load v0; v2 = v1 + v9; v3 = load v2; store v3`` gives the width of the second load.
    """
    widths = []
    for index, item in enumerate(code):
        if item.access is not None and item.access.kind == "load":
            following = [*code[index + 1 :], *code, *code[:index]] if loops else code[index + 1 :]
            if not _ends_in_address(item.writes, following):
                widths.append(item.access.bytes_per_lane)
    return widths


def _ends_in_address(registers: frozenset[str], following: Sequence[Instruction]) -> bool:
    held = set(registers)
    for item in following:
        if item.access is not None and item.access.address & held:
            return True
        if item.reads & held:
            held |= item.writes
        else:
            held -= item.writes
        if not held:
            return False
    return False
