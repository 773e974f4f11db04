"""Reading assembly: the hot loop, matrix instructions, widths and resources.

Every expected number is counted by hand in the snippet beside it.
"""

from __future__ import annotations

import textwrap

import pytest

from xmoe.kernels.assembly import Figures, HotLoop, common_width, read_amdgcn, read_ptx
from xmoe.kernels.assembly_amdgcn import read_metadata, read_program
from xmoe.kernels.assembly_ptx import parse_resources
from xmoe.kernels.assembly_ptx import read_program as read_ptx_program
from xmoe.kernels.control_flow import data_loads, find_loops

METADATA = """
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     {agpr_count}
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     22
    .sgpr_spill_count: {sgpr_spills}
    .vgpr_count:     {vgpr_count}
    .vgpr_spill_count: {vgpr_spills}
    .wavefront_size: 64
...
"""
MFMA = "v_mfma_f32_16x16x16_bf16 v[40:43], v[44:45], v[46:47], v[40:43]"


def amdgcn(
    code: str,
    *,
    vgpr_count: int = 96,
    agpr_count: int = 0,
    vgpr_spills: int = 0,
    sgpr_spills: int = 0,
    scratch: int = 0,
) -> str:
    """A kernel as the backend writes one: ``code`` with labels at the start of a line, and the metadata."""
    numbers = dict(vgpr_count=vgpr_count, agpr_count=agpr_count, vgpr_spills=vgpr_spills)
    body = textwrap.dedent(code)
    return (
        f"\t.text\n_k_kernel:      ; @_k_kernel\n{body}\n\ts_endpgm\n.Lfunc_end0:\n\tv_mov_b32_e32 v0, v1\n"
        + METADATA.format(**numbers, sgpr_spills=sgpr_spills, scratch=scratch)
    )


def loop_of(code: str) -> HotLoop:
    found = read_amdgcn(amdgcn(code)).hot_loop
    assert found is not None
    return found


class TestHotLoop:
    def test_prologue_and_epilogue_do_not_count(self):
        loop = loop_of(f"""
            \tv_mov_b32_e32 v7, v8
            \t{MFMA}
            .LBB0_1:                    ; %.lr.ph
            \tv_add_u32_e32 v4, 1, v4
            \t{MFMA}
            \t{MFMA}
            \tv_add_u32_e32 v5, 1, v5
            \ts_cbranch_scc1 .LBB0_1
            ; %bb.2:
            \t{MFMA}
            """)
        assert (loop.matrix_instructions, loop.matrix_units, loop.vector_instructions) == (2, 2.0, 2)
        assert loop.mfma_share == 0.5

    def test_of_nested_loops_the_inner_one(self):
        loop = loop_of(f"""
            .LBB0_1:
            \tv_mov_b32_e32 v7, v8
            \t{MFMA}
            .LBB0_2:
            \t{MFMA}
            \tv_mov_b32_e32 v7, v8
            \ts_cbranch_scc1 .LBB0_2
            \tv_mov_b32_e32 v7, v8
            \t{MFMA}
            \ts_cbranch_vccnz .LBB0_1
            """)
        assert (loop.matrix_instructions, loop.vector_instructions) == (1, 1)

    def test_an_inner_loop_without_matrix_instructions_is_not_the_hot_one(self):
        loop = loop_of(f"""
            .LBB0_1:
            \t{MFMA}
            .LBB0_2:
            \tv_mov_b32_e32 v7, v8
            \ts_cbranch_scc1 .LBB0_2
            \ts_cbranch_vccnz .LBB0_1
            """)
        assert (loop.matrix_instructions, loop.vector_instructions) == (1, 1)

    def test_of_an_unmasked_main_loop_and_a_masked_one_the_one_with_more_work(self):
        loop = loop_of(f"""
            .LBB0_1:
            \tv_cndmask_b32_e32 v1, v2, v3, vcc
            \tv_cndmask_b32_e32 v1, v2, v3, vcc
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_1
            .LBB0_2:
            \t{MFMA}
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_2
            """)
        assert (loop.matrix_instructions, loop.vector_instructions) == (2, 0)

    def test_of_two_products_of_one_sum_the_worse(self):
        loop = loop_of(f"""
            .LBB0_1:
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_1
            .LBB0_2:
            \t{MFMA}
            \tv_mov_b32_e32 v7, v8
            \ts_cbranch_scc1 .LBB0_2
            """)
        assert (loop.matrix_instructions, loop.vector_instructions) == (1, 1)

    def test_none_where_no_loop_multiplies_matrices(self):
        figures = read_amdgcn(amdgcn(f"\t{MFMA}\n.LBB0_1:\n\tv_mov_b32_e32 v7, v8\n\ts_cbranch_scc1 .LBB0_1"))
        assert figures.hot_loop is None

    def test_moves_between_register_files_are_counted_and_are_vector_instructions(self):
        loop = loop_of(f"""
            \tv_accvgpr_write_b32 a0, v1
            .LBB0_1:
            \tv_accvgpr_read_b32 v1, a0
            \t{MFMA}
            \tv_accvgpr_write_b32 a0, v1
            \tv_accvgpr_mov_b32 a0, a1
            \ts_cbranch_scc1 .LBB0_1
            """)
        assert (loop.accvgpr_moves, loop.vector_instructions) == (3, 3)


@pytest.mark.parametrize(
    ("instruction", "multiply_adds"),
    [
        # gfx90a leaves the number of blocks to the reader: 16 * 16 * 16, 32 * 32 * 8, 4 blocks of 16 * 16 * 4, ...
        ("v_mfma_f32_16x16x16bf16_1k v[0:3], v[4:5], v[6:7], v[0:3]", 4096),
        ("v_mfma_f32_16x16x16f16 a[0:3], v[4:5], v[6:7], a[0:3]", 4096),
        ("v_mfma_f32_32x32x8bf16_1k v[0:15], v[20:21], v[22:23], v[0:15]", 8192),
        ("v_mfma_f32_16x16x4f32 v[0:3], v4, v5, v[0:3]", 1024),
        ("v_mfma_f32_32x32x2f32 v[0:15], v20, v21, v[0:15]", 2048),
        ("v_mfma_f32_16x16x4f16 v[0:15], v[20:21], v[22:23], v[0:15]", 4096),
        ("v_mfma_f32_4x4x4f16 v[0:3], v[4:5], v[6:7], v[0:3]", 1024),
        ("v_mfma_f64_16x16x4f64 a[0:7], v[8:9], v[10:11], a[0:7]", 1024),
        # gfx942
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]", 4096),
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[20:21], v[22:23], v[0:15]", 8192),
        ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, 0", 1024),
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]", 1024),
        ("v_mfma_f32_32x32x4_2b_f16 v[0:31], v[40:41], v[42:43], v[0:31]", 8192),
        # gfx950
        ("v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]", 8192),
        ("v_mfma_f32_32x32x16_f16 v[0:15], v[20:23], v[24:27], v[0:15]", 16384),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21 op_sel:[0,0,0]", 32768),
        # no matrix instruction
        ("v_fma_f32 v0, v1, v2, v3", 0),
        ("v_dot2_f32_f16 v0, v1, v2, v3", 0),
    ],
)
def test_work_of_a_matrix_instruction(instruction: str, multiply_adds: int):
    (read, _end) = read_program(amdgcn(f"\t{instruction}")).instructions
    assert read.multiply_adds == multiply_adds


@pytest.mark.parametrize(
    ("instruction", "kind", "num_bytes", "address"),
    [
        ("global_load_dwordx4 v[4:7], v[2:3], off", "load", 16, {"v2", "v3"}),
        ("global_load_dwordx4 v[4:7], v2, s[6:7] offset:16", "load", 16, {"v2", "s6", "s7"}),
        ("global_load_dwordx3 v[4:6], v[2:3], off", "load", 12, {"v2", "v3"}),
        ("global_load_dword v4, v[2:3], off", "load", 4, {"v2", "v3"}),
        ("global_load_ushort v4, v[2:3], off", "load", 2, {"v2", "v3"}),
        ("global_load_short_d16_hi v4, v[2:3], off", "load", 2, {"v2", "v3"}),
        ("global_load_ubyte v4, v[2:3], off", "load", 1, {"v2", "v3"}),
        ("flat_load_dwordx2 v[4:5], v[2:3]", "load", 8, {"v2", "v3"}),
        ("buffer_load_dwordx4 v[4:7], v2, s[8:11], 0 offen", "load", 16, {"v2", "s8", "s9", "s10", "s11"}),
        ("buffer_load_dword v2, s[8:11], s3 offen lds", "load", 4, {"v2", "s8", "s9", "s10", "s11", "s3"}),
        ("global_load_lds_dwordx4 v[2:3], off", "load", 16, {"v2", "v3"}),
        ("global_store_dwordx4 v[2:3], v[4:7], off", "store", 16, {"v2", "v3"}),
        ("global_store_short_d16_hi v[2:3], v4, off", "store", 2, {"v2", "v3"}),
        ("global_store_byte v2, v4, s[6:7]", "store", 1, {"v2", "s6", "s7"}),
        ("buffer_store_dwordx2 v[4:5], v2, s[8:11], 0 offen", "store", 8, {"v2", "s8", "s9", "s10", "s11"}),
    ],
)
def test_accesses_of_global_memory(instruction: str, kind: str, num_bytes: int, address: set[str]):
    (read, _end) = read_program(amdgcn(f"\t{instruction}")).instructions
    assert read.access is not None
    assert (read.access.kind, read.access.bytes_per_lane, read.access.address) == (kind, num_bytes, address)
    assert not read.writes & read.access.address


@pytest.mark.parametrize(
    "instruction",
    [
        "ds_read_b128 v[4:7], v2",
        "ds_write_b128 v2, v[4:7]",
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "scratch_load_dword v4, off, s32",
        "buffer_store_dword v4, off, s[0:3], 0 offset:4    ; 4-byte Folded Spill",
        "buffer_load_dword v4, off, s[0:3], 0 offset:4     ; 4-byte Folded Reload",
        "global_atomic_add v2, v4, s[6:7]",
    ],
)
def test_what_is_no_access_of_global_memory(instruction: str):
    (read, _end) = read_program(amdgcn(f"\t{instruction}")).instructions
    assert read.access is None


def test_code_ends_with_the_function():
    """What the assembly has behind the kernel, here a move, is not read."""
    assert [item.mnemonic for item in read_program(amdgcn("\tv_nop")).instructions] == ["v_nop", "s_endpgm"]


class TestDataLoads:
    def test_row_indices_are_left_out(self):
        program = read_program(
            amdgcn("""
            \tglobal_load_dword v1, v[2:3], off
            \tv_ashrrev_i32_e32 v5, 31, v1
            \tv_lshlrev_b64 v[6:7], 1, v[4:5]
            \tglobal_load_dwordx4 v[8:11], v[6:7], off
            \tglobal_store_dwordx4 v[12:13], v[8:11], off
            """)
        )
        assert data_loads(program.instructions, loops=False) == [16]

    def test_an_index_that_is_overwritten_first_is_none(self):
        program = read_program(
            amdgcn("""
            \tglobal_load_dword v1, v[2:3], off
            \tglobal_store_dword v[4:5], v1, off
            \tv_mov_b32_e32 v1, 0
            \tv_mov_b32_e32 v0, 0
            \tglobal_load_dwordx4 v[8:11], v[0:1], off
            """)
        )
        assert data_loads(program.instructions, loops=False) == [4, 16]

    def test_of_a_pipelined_loop_the_index_is_used_in_the_next_turn(self):
        """v[6:7] addresses the rows of this turn; the id loaded below becomes the address of the next."""
        loop = loop_of(f"""
            .LBB0_1:
            \tglobal_load_dwordx4 v[8:11], v[6:7], off
            \tv_mov_b32_e32 v6, v1
            \tglobal_load_dword v1, v[2:3], off
            \tds_write_b128 v20, v[8:11]
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_1
            """)
        assert loop.loads == {16: 1}

    def test_a_comparison_passes_no_value_on(self):
        loop = loop_of(f"""
            .LBB0_1:
            \tglobal_load_ushort v1, v[2:3], off
            \tv_cmp_lt_i32_e32 vcc, v1, v9
            \tv_cndmask_b32_e32 v6, v7, v8, vcc
            \tglobal_load_dwordx4 v[12:15], v[6:7], off
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_1
            """)
        assert loop.loads == {16: 1, 2: 1}

    def test_loads_past_the_registers_are_of_data(self):
        loop = loop_of(f"""
            .LBB0_1:
            \tglobal_load_lds_dwordx4 v[2:3], off
            \tbuffer_load_dword v4, s[8:11], 0 offen lds
            \t{MFMA}
            \ts_cbranch_scc1 .LBB0_1
            """)
        assert loop.loads == {16: 1, 4: 1}


def test_the_width_that_matters():
    assert common_width({}) == 0
    assert common_width({16: 8}) == 16
    assert common_width({16: 2, 4: 1}) == 16, "4 of 36 bytes, a weight beside its row"
    assert common_width({16: 4, 4: 8}) == 4, "32 of 96 bytes: one operand of two is loaded in pieces"
    assert common_width({16: 8, 2: 32}) == 2


class TestResources:
    def test_of_the_metadata(self):
        figures = read_amdgcn(
            amdgcn("\tv_nop", vgpr_count=186, agpr_count=58, vgpr_spills=3, sgpr_spills=4, scratch=12)
        )
        assert (figures.vgprs, figures.agprs, figures.sgprs) == (186, 58, 22)
        assert (figures.vgpr_spills, figures.sgpr_spills, figures.spills, figures.scratch_bytes) == (3, 4, 7, 12)

    def test_metadata_of_another_section_is_not_read(self):
        text = "    .vgpr_spill_count: 9\n" + METADATA.format(
            vgpr_count=8, agpr_count=0, vgpr_spills=0, sgpr_spills=0, scratch=0
        )
        assert read_metadata(text)["vgpr_spill_count"] == 0

    def test_missing_metadata_are_an_error_not_zero_spills(self):
        with pytest.raises(KeyError, match="vgpr_count"):
            read_amdgcn("\tv_nop\n\ts_endpgm\n")

    def test_of_machine_code_for_nvidia(self):
        text = " Function _k:\n  REG:84 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:616 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
        assert parse_resources(text) == (84, 24)
        with pytest.raises(RuntimeError, match="no resource usage"):
            parse_resources("cuobjdump info: nothing\n")

    def test_local_memory_is_spilled_registers(self):
        figures = read_ptx(ptx("\tret;"), registers=255, local_bytes=24)
        assert (figures.vgprs, figures.spills, figures.scratch_bytes) == (255, 6, 24)


def ptx(code: str) -> str:
    return (
        "//\n.version 8.8\n.target sm_80\n.visible .entry _k_kernel(\n\t.param .u64 _k_kernel_param_0\n)\n"
        ".reqntid 128\n{\n\t.reg .b32 \t%r<9>;\n$L__func_begin0:\n" + textwrap.dedent(code) + "\n\tret;\n}\n"
        "\t.section .debug_abbrev\n\t{\n.b8 1\n\t}\n"
    )


def ptx_figures(code: str) -> Figures:
    return read_ptx(ptx(code), registers=32, local_bytes=0)


class TestPtx:
    def test_hot_loop(self):
        figures = ptx_figures("""
            \t@%p1 bra \t$L__BB0_3;
            $L__BB0_2:                              // =>This Loop Header: Depth=1
            \tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 }, { %r3 }, { %r4 }, { %r1, %r2 };
            \tcp.async.cg.shared.global [ %r5 + 0 ], [ %rd30 + 0 ], 0x10, %r6;
            \t// begin inline asm
            \tcp.async.ca.shared.global [ %r5 + 0 ], [ %rd31 + 0 ], 0x4;
            \tcp.async.commit_group;
            \t@%p2 bra \t$L__BB0_2;
            $L__BB0_3:
            \tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 }, { %r3 }, { %r4 }, { %r1, %r2 };
            """)
        assert figures.hot_loop is not None
        assert (figures.hot_loop.matrix_instructions, figures.hot_loop.matrix_units) == (1, 0.5)
        assert figures.hot_loop.loads == {16: 1, 4: 1}

    def test_work_of_a_warp_group(self):
        figures = ptx_figures("""
            $L__BB0_2:
            \twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, %rd57, %rd58, %p9, 1, 1, 0, 0;
            \twgmma.commit_group.sync.aligned;
            \t@!%p2 bra \t$L__BB0_2;
            """)
        assert figures.hot_loop is not None
        assert (figures.hot_loop.matrix_instructions, figures.hot_loop.matrix_units) == (1, 16.0)

    def test_an_unconditional_branch_ends_its_block(self):
        program = read_ptx_program(ptx("\tbra.uni \t$L__BB0_2;\n$L__BB0_1:\n\tret;\n$L__BB0_2:\n\tbra.uni $L__BB0_1;"))
        assert [item.falls_through for item in program.instructions] == [False, False, False, False]
        assert find_loops(program) == []

    def test_widths(self):
        figures = ptx_figures("""
            \t@%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 0 ];
            \tld.global.L1::evict_last.v2.b32 { %r6, %r7 }, [ %rd3 + 16 ];
            \tmov.u16 %rs1, 0x0; ld.global.b16 { %rs1 }, [ %rd4 + 0 ];
            \tld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r12];
            \tld.param.b64 %rd5, [_k_kernel_param_0];
            \t@%p1 st.global.v4.b32 [ %rd6 + 0 ], { %r2, %r3, %r4, %r5 };
            \tst.global.b8 [ %rd7 + 0 ], { %rs1 };
            """)
        assert figures.loads == {16: 1, 8: 1, 2: 1}
        assert figures.stores == {16: 1, 1: 1}

    def test_row_indices_are_left_out(self):
        figures = ptx_figures("""
            \tld.global.b32 { %r1 }, [ %rd1 + 0 ];
            \tmul.wide.s32 \t%rd2, %r1, 2048;
            \tadd.s64 \t%rd3, %rd2, %rd4;
            \tld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ];
            """)
        assert figures.loads == {16: 1}
