"""References on their way, and what a rank makes of those it received: ``reference_route_messages`` has the twins.

Work is cut by the messages' counts: a program moves the items of one of them, which lie side by side before and after.
Integers only, nothing atomic, nothing read back by the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .reference_route_messages import Inbox, MessageStarts
from .tuning import Config, config_for


@triton.jit
def _copy_span(source, out, start, end, shift, BLOCK_S: tl.constexpr):
    """``out[n + shift] = source[n]`` of the n from start to end, shared out by blocks among programs of the first axis.

    Example: start 1, end 3, shift 3: out[4:6] = source[1:3].
    """
    for first in range(start + tl.program_id(0) * BLOCK_S, end, tl.num_programs(0) * BLOCK_S):
        place = first + tl.arange(0, BLOCK_S)
        inside = place < end
        tl.store(out + shift + place, tl.load(source + place, mask=inside, other=0), mask=inside)


@triton.jit
def _pack_references_kernel(
    served,
    passed_on,
    by_rank,
    begins,
    references,
    num_served,
    num_passed_on,
    num_ranks,
    num_places,
    num_columns,
    BLOCK_S: tl.constexpr,
):
    """Program (i, w, part) copies references of rank w's: of assignments in part 0, of rows passed on in part 1.

    Example: served [7, 8, 9], of which rank 1's begin at 1, and go to 4: references[4:6] = [8, 9].
    """
    rank, part = tl.program_id(1), tl.program_id(2)
    row = tl.cast(rank, tl.int64) * num_columns + tl.where(part == 0, 1 + 2 * num_places, 1)
    start = tl.load(by_rank + row)
    is_last = rank == num_ranks - 1
    following = tl.load(by_rank + row + tl.where(is_last, 0, num_columns))
    end = tl.where(is_last, tl.where(part == 0, num_served, num_passed_on), following)
    shift = tl.load(begins + tl.cast(rank, tl.int64) * 2 + 1 - part) - start
    if part == 0:
        _copy_span(served, references, start, end, shift, BLOCK_S)
    else:
        _copy_span(passed_on, references, start, end, shift, BLOCK_S)


def pack_references(
    references_N: Tensor, passed_on_N: Tensor, served_N: Tensor, starts: MessageStarts, begins_W2: Tensor
) -> None:
    """Writes to ``references`` those of each rank's rows passed on and of its assignments. See the twin."""
    if not references_N.is_contiguous() or references_N.numel() < passed_on_N.numel() + served_N.numel():
        raise ValueError(
            f"references_N {tuple(references_N.shape)} must be contiguous and hold {passed_on_N.numel()} and "
            f"{served_N.numel()} references"
        )
    (num_ranks, num_columns), passes_on = starts.by_rank_WC.shape, starts.num_places > 0
    num_passed_on, num_served = passed_on_N.numel() * passes_on, served_N.numel()
    largest = max(num_passed_on, num_served)
    config = config_for("references", arch=arch_of(references_N), dtype=torch.int32, rows=largest)
    # One block for each program of a rank that has its share.
    splits = triton.cdiv(largest, num_ranks * config.blocks["BLOCK_S"])
    launch(
        Launch(
            op="references",
            kernel=_pack_references_kernel,
            grid=(splits, num_ranks, 1 + passes_on),
            arguments=dict(
                served=served_N.contiguous(),
                passed_on=passed_on_N.contiguous(),
                by_rank=starts.by_rank_WC,
                begins=begins_W2.contiguous(),
                references=references_N,
                num_served=num_served,
                num_passed_on=num_passed_on,
                num_ranks=num_ranks,
                num_places=starts.num_places,
                num_columns=num_columns,
            ),
            config=config,
            cost=Cost(
                bytes_read=(num_passed_on + num_served + num_ranks * (1 + passes_on) * splits * 3) * 4,
                bytes_written=(num_passed_on + num_served) * 4,
            ),
        )
    )


@triton.jit
def _take_assignments_kernel(
    messages,
    by_rank,
    by_column,
    begins,
    references,
    weight_ids,
    row_ids,
    assignments,
    stride,
    num_columns,
    width,
    PLACES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (w, x) writes the assignments of expert x to tokens of rank w, which lie side by side in each order.

    Example: one source, one hop, width 2, references [0, 1, 2]: rows 0, 0, 1, assignments [[0, 1], [2, ..]].
    """
    source = tl.cast(tl.program_id(0), tl.int64)
    first_assigned: tl.constexpr = 1 + 2 * PLACES
    column, row = first_assigned + tl.program_id(1), source * num_columns
    count = tl.cast(tl.load(messages + source * stride + column), tl.int32)
    weight = tl.load(by_rank + row + column)
    place = tl.load(by_column + row + column)
    reference = tl.load(begins + source * 2 + 1) + weight - tl.load(by_rank + row + first_assigned)
    # Where the source's rows lie: those of the first hop, and those that each neighbour passed on.
    lies = (tl.load(by_column + row),)
    number = (0,)
    for neighbour in tl.static_range(PLACES):
        lies += (tl.load(by_column + row + 1 + PLACES + neighbour),)
        number += (tl.load(by_rank + row + 1 + PLACES + neighbour),)
    for first in range(0, count, BLOCK_S):
        local = first + tl.arange(0, BLOCK_S)
        inside = local < count
        found = tl.load(references + reference + local, mask=inside, other=0)
        own = found // width
        lying = own + lies[0]
        for neighbour in tl.static_range(PLACES):
            passed = own - number[neighbour + 1]
            lying = tl.where(passed >= 0, passed + lies[neighbour + 1], lying)
        tl.store(weight_ids + place + local, weight + local, mask=inside)
        tl.store(row_ids + place + local, lying, mask=inside)
        entry = tl.cast(lying, tl.int64) * width + found % width
        tl.store(assignments + entry, place + local, mask=inside)


def take_assignments(inbox: Inbox, *, width: int, num_rows: int, num_assigned: int) -> tuple[Tensor, Tensor, Tensor]:
    """The assignments of a rank's experts: int32 ``[M]``, ``[M]`` and ``[R, width]``. See the twin."""
    _check(width=width, num_rows=num_rows, num_assigned=num_assigned)
    arguments, config, starts = _received(inbox), _config(inbox, num_assigned), inbox.starts
    num_ranks, num_columns = starts.by_rank_WC.shape
    weight_ids_M = inbox.references_N.new_empty((num_assigned,))
    row_ids_M = torch.empty_like(weight_ids_M)
    assignments_RK = torch.full((num_rows, width), num_assigned, dtype=torch.int32, device=weight_ids_M.device)
    num_local = num_columns - 1 - 2 * starts.num_places
    launch(
        Launch(
            op="arrivals",
            kernel=_take_assignments_kernel,
            grid=(num_ranks, num_local),
            arguments=dict(
                **arguments,
                weight_ids=weight_ids_M,
                row_ids=row_ids_M,
                assignments=assignments_RK,
                width=width,
                PLACES=starts.num_places,
            ),
            config=config,
            # A count, and of the source the starts of the weights twice, of the references and the rows.
            cost=Cost(
                bytes_read=num_ranks * num_local * (8 + 4 * (5 + 2 * starts.num_places)) + num_assigned * 4,
                bytes_written=num_assigned * 3 * 4,
            ),
        )
    )
    return weight_ids_M, row_ids_M, assignments_RK


@triton.jit
def _take_copies_kernel(
    messages,
    by_rank,
    by_column,
    begins,
    references,
    slot_ids,
    places,
    stride,
    num_columns,
    width,
    num_first,
    num_places,
    BLOCK_S: tl.constexpr,
):
    """Program (w, p) writes the copies that place p gets of rows from rank w; p = P writes those rows themselves.

    Example: two rows from one source, width 2, reference [3]: slot 3, places [[0, ..], [1, 2]].
    """
    source, target = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    is_copy = target < num_places
    row = source * num_columns
    column = tl.where(is_copy, 1 + target, 0)
    count = tl.cast(tl.load(messages + source * stride + column), tl.int32)
    first_row, number = tl.load(by_column + row), tl.load(by_column + row + column)
    reference = tl.load(begins + source * 2) + tl.load(by_rank + row + column) - tl.load(by_rank + row + 1)
    for first in range(0, count, BLOCK_S):
        local = first + tl.arange(0, BLOCK_S)
        inside = local < count
        if is_copy:
            found = tl.load(references + reference + local, mask=inside, other=0)
            slot = tl.cast(first_row, tl.int64) * width + found
            tl.store(slot_ids + number + local, tl.cast(slot, tl.int32), mask=inside)
            tl.store(places + slot, num_first + number + local, mask=inside)
        else:
            own = first_row + local
            tl.store(places + tl.cast(own, tl.int64) * width, own, mask=inside)


def take_copies(inbox: Inbox, *, width: int, num_first: int, num_copies: int) -> tuple[Tensor, Tensor]:
    """The rows that a rank passes on: int32 ``[N]`` and ``[num_first, width]``. See the twin."""
    _check(width=width, num_rows=num_first, num_assigned=num_copies)
    arguments, config, starts = _received(inbox), _config(inbox, num_copies), inbox.starts
    if starts.num_places < 1:
        raise ValueError(f"num_places ({starts.num_places}) must be at least 1: without a second hop nothing is copied")
    slot_ids_N = inbox.references_N.new_empty((num_copies,))
    places_RK = torch.full((num_first, width), num_first + num_copies, dtype=torch.int32, device=slot_ids_N.device)
    programs = starts.by_rank_WC.shape[0] * (starts.num_places + 1)
    launch(
        Launch(
            op="arrivals",
            kernel=_take_copies_kernel,
            grid=(starts.by_rank_WC.shape[0], starts.num_places + 1),
            arguments=dict(
                **arguments,
                slot_ids=slot_ids_N,
                places=places_RK,
                width=width,
                num_first=num_first,
                num_places=starts.num_places,
            ),
            config=config,
            cost=Cost(
                bytes_read=programs * (8 + 5 * 4) + num_copies * 4, bytes_written=(2 * num_copies + num_first) * 4
            ),
        )
    )
    return slot_ids_N, places_RK


def _received(inbox: Inbox) -> dict[str, Any]:
    """What both kernels read of the inbox."""
    message_WC, starts = inbox.message_WC, inbox.starts
    if message_WC.shape != starts.by_rank_WC.shape or inbox.begins_W2.shape != (message_WC.shape[0], 2):
        raise ValueError(
            f"message_WC {tuple(message_WC.shape)} and begins_W2 {tuple(inbox.begins_W2.shape)} must be those of "
            f"starts: {tuple(starts.by_rank_WC.shape)}"
        )
    if message_WC.stride(1) != 1:
        message_WC = message_WC.contiguous()
    return dict(
        messages=message_WC,
        by_rank=starts.by_rank_WC,
        by_column=starts.by_column_WC,
        begins=inbox.begins_W2.contiguous(),
        references=inbox.references_N.contiguous(),
        stride=message_WC.stride(0),
        num_columns=message_WC.shape[1],
    )


def _config(inbox: Inbox, num_items: int) -> Config:
    return config_for("arrivals", arch=arch_of(inbox.references_N), dtype=torch.int32, rows=num_items)


def _check(*, width: int, num_rows: int, num_assigned: int) -> None:
    if width < 1 or num_rows * width >= 2**31 or num_assigned >= 2**31:
        raise ValueError(
            f"width ({width}) must be at least 1, and {num_rows} rows times it and {num_assigned} items below 2^31"
        )
