"""Plan kernels: loops over single slots check the twins and the kernels; all of it integers, so equal bit by bit."""

import pytest
import torch

from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.launch import counting, recording
from xmoe.testing import assignments_of

BACKENDS = [reference, triton_kernels]

# Ids and the number of experts. The interpreter's blocks have 16 slots, and its scan takes 4 blocks at a time.
IDS = {
    "no slots": (lambda: torch.empty(0, 2), 4),
    "one expert": (lambda: torch.zeros(7, 1), 1),
    "one slot, dropped": (lambda: torch.full((1, 1), -1), 3),
    "all dropped": (lambda: torch.full((7, 3), -1), 5),
    "all on one of many": (lambda: torch.full((63, 1), 6), 7),
    "k is E": (lambda: torch.stack([torch.randperm(7) for _ in range(9)]), 7),
    "some dropped, off every block": (lambda: torch.randint(-1, 16, (257, 1)), 16),
    "none dropped, whole blocks": (lambda: torch.randint(0, 5, (16, 4)), 5),
    "more experts than slots": (lambda: torch.randint(-1, 1000, (7, 3)), 1000),
    "last expert of a power of two": (lambda: torch.full((3, 1), 1023), 1024),
}


@pytest.fixture(params=IDS)
def ids_and_experts(request):
    make, num_experts = IDS[request.param]
    return make().int(), num_experts


def test_slots_are_sorted_by_expert_then_slot(ids_and_experts):
    ids, num_experts = ids_and_experts
    flat = ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda slot: (flat[slot] if flat[slot] >= 0 else num_experts, slot))
    places = [expected.index(slot) for slot in range(len(flat))]
    for backend in BACKENDS:
        found = backend.sort_slots(ids, num_experts)
        assert [x.dtype for x in found] == [torch.int32, torch.int32]
        assert found[0].tolist() == expected, backend.__name__
        assert found[1].tolist() == places, backend.__name__


def test_ids_are_counted(ids_and_experts):
    ids, num_experts = ids_and_experts
    flat = ids.flatten().tolist()
    for backend in BACKENDS:
        found = backend.count_ids(ids, num_experts)
        assert found.dtype == torch.int64
        assert found.tolist() == [flat.count(expert) for expert in range(num_experts)], backend.__name__


def test_ids_of_64_bits_and_any_layout():
    ids = torch.randint(-1, 6, (3, 19)).t()
    assert not ids.is_contiguous()
    for found, expected in zip(triton_kernels.sort_slots(ids, 6), reference.sort_slots(ids, 6), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(triton_kernels.count_ids(ids, 6), reference.count_ids(ids, 6))


def test_the_sort_is_three_launches_whatever_the_number_of_experts():
    for num_experts in (1, 8, 1024):
        with counting() as counts:
            triton_kernels.sort_slots(torch.zeros(5, 2).int(), num_experts)
        assert counts == {"block_counts": 1, "block_offsets": 1, "place_slots": 1}


COUNTS = {
    "mixed": [3, 0, 2],
    "none": [0, 0, 0],
    "one expert": [7],
    "one row": [0, 1],
    "all on one, off every block": [0, 257, 0, 0],
    "whole tiles": [32, 16, 0, 16],
    "not a power of two": [1, 7, 63, 0, 5, 16, 2],
}


@pytest.mark.parametrize("block_m", [1, 2, 16, 64])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tiles_cover_every_row_once(counts, block_m):
    num_rows = sum(counts)
    experts, rows = [], []
    for expert, count in enumerate(counts):
        for start in range(0, count, block_m):
            experts.append(expert)
            rows.append(sum(counts[:expert]) + start)
    found = [b.tile_schedule(torch.tensor(counts), block_m=block_m, num_rows=num_rows) for b in BACKENDS]
    for schedule in found:
        assert schedule.offsets_e1.tolist() == [sum(counts[:expert]) for expert in range(len(counts) + 1)]
        assert schedule.num_tiles.tolist() == [len(rows)]
        assert len(rows) <= schedule.max_tiles == len(schedule.tile_expert) == len(schedule.tile_row)
        assert schedule.tile_expert[: len(rows)].tolist() == experts
        assert schedule.tile_row[: len(rows)].tolist() == rows
        assert (schedule.num_rows, schedule.block_m, schedule.num_experts) == (num_rows, block_m, len(counts))
    for name in ("offsets_e1", "tile_expert", "tile_row", "num_tiles"):
        tensors = [getattr(schedule, name) for schedule in found]
        assert tensors[0].dtype == tensors[1].dtype == torch.int32
        assert torch.equal(*tensors), name


def test_places_of_the_local_plan_are_its_assignments():
    """What the local dispatcher takes for ``assignments_RK`` is the inverse of its row ids."""
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(11)]).masked_fill(torch.rand(11, 3) < 0.3, -1)
    slots, places = triton_kernels.sort_slots(ids, 5)
    num_rows = int((ids >= 0).sum())
    found = places.view(11, 3).clamp(max=num_rows).sort(dim=1).values
    expected = assignments_of(slots[:num_rows] // 3, 11)
    assert torch.equal(found[:, : expected.shape[1]], expected)
    assert bool((found[:, expected.shape[1] :] == num_rows).all())


def test_what_does_not_fit_is_named():
    with recording("gfx90a"):
        with pytest.raises(ValueError, match=r"num_bins \(0\)"):
            triton_kernels.count_ids(torch.empty(3, device="meta", dtype=torch.int32), 0)
        with pytest.raises(ValueError, match=r"number of ids \(2147483648\)"):
            triton_kernels.sort_slots(torch.empty(2**28, 8, device="meta", dtype=torch.int32), 64)
        triton_kernels.sort_slots(torch.empty(2**31 - 1, 1, device="meta", dtype=torch.int32), 64)
        with pytest.raises(ValueError, match=r"block_m \(0\)"):
            triton_kernels.tile_schedule(torch.empty(4, device="meta", dtype=torch.int64), block_m=0, num_rows=3)
        with pytest.raises(ValueError, match=r"\(2, 2\)"):
            triton_kernels.tile_schedule(torch.empty(2, 2, device="meta", dtype=torch.int64), block_m=16, num_rows=3)
