"""Loops of a program: found by where control can go, whatever the order of the text."""

from __future__ import annotations

from collections.abc import Sequence

from xmoe.kernels.control_flow import Instruction, Loop, Program, find_loops


def branch(target: str, *, falls_through: bool = True) -> Instruction:
    return Instruction(mnemonic="branch", target=target, falls_through=falls_through)


def flow(*lines: str | Instruction) -> Program:
    """A program of labels (``"x:"``), plain instructions and branches."""
    instructions: list[Instruction] = []
    labels = {}
    for line in lines:
        if isinstance(line, Instruction):
            instructions.append(line)
        elif line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            instructions.append(Instruction(mnemonic=line, falls_through=line != "end"))
    return Program(instructions=instructions, labels=labels)


def members(loops: Sequence[Loop]) -> list[list[int]]:
    return sorted(sorted(loop.members) for loop in loops)


class TestLoops:
    def test_straight_code_and_forward_branches_have_none(self):
        assert find_loops(flow()) == []
        assert find_loops(flow("a", branch("x"), "b", "x:", "c", "end")) == []

    def test_one_block(self):
        assert members(find_loops(flow("a", "x:", "b", branch("x"), "end"))) == [[1, 2]]

    def test_header_at_the_bottom(self):
        """Entered by a jump to its test, as compilers rotate loops: the lowest address is not where it starts."""
        program = flow(branch("test", falls_through=False), "body:", "a", "test:", "b", branch("body"), "end")
        (loop,) = find_loops(program)
        assert loop.header == 2
        assert sorted(loop.members) == [1, 2, 3]

    def test_nested(self):
        program = flow("outer:", "a", "inner:", "b", branch("inner"), "c", branch("outer"), "end")
        assert members(find_loops(program)) == [[0, 1, 2, 3, 4], [1, 2]]

    def test_branches_inside_belong_to_the_loop(self):
        program = flow("x:", "a", branch("skip"), "b", "skip:", "c", branch("x"), "end")
        assert members(find_loops(program)) == [[0, 1, 2, 3, 4]]

    def test_two_back_edges_to_one_header_are_one_loop(self):
        program = flow("x:", "a", branch("x"), "b", branch("x"), "end")
        assert members(find_loops(program)) == [[0, 1, 2, 3]]

    def test_a_block_laid_out_after_the_exit_belongs_to_the_loop(self):
        program = flow("x:", "a", branch("far"), "end", "far:", "b", branch("x", falls_through=False))
        assert members(find_loops(program)) == [[0, 1, 3, 4]]

    def test_a_backward_jump_into_code_that_is_left_is_no_loop(self):
        """Backward in the text only: no path leads round."""
        program = flow(branch("start", falls_through=False), "out:", "end", "start:", "a", branch("out"), "end")
        assert find_loops(program) == []

    def test_unreached_code_makes_no_loop(self):
        program = flow("a", "end", "dead:", "b", branch("dead", falls_through=False))
        assert find_loops(program) == []
