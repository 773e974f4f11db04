"""Messages of the ranks of a group, where what they count begins, and their sums: ``reference_route_messages`` has
the twins and says what a message is. Integers only, nothing atomic, nothing read back by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .reference_route import RankMap
from .reference_route_messages import MessageStarts
from .tuning import Config, config_for


@triton.jit
def _route_message_kernel(
    first,
    second,
    tokens_per_expert,
    neighbours,
    place_of_rank,
    messages,
    num_ranks,
    num_places,
    num_local,
    num_columns,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program writes the messages to its ranks; without a second hop ``second`` is None.

    Example: rank 1 of a node of two at place 1, second [[0, 2], [3, 0]]: columns 1 to 4 of its message are 3, 0, what
    it passes on, and 2, 0, what reaches it from either place.
    """
    rank = (tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_rank, row = rank < num_ranks, tl.cast(rank, tl.int64)
    found = tl.load(first + row + tl.zeros((1, COLUMNS), tl.int32), mask=is_rank & (column == 0), other=0)
    if second is not None:
        is_passed_on = is_rank & (column >= 1) & (column < 1 + num_places)
        found += tl.load(second + row * num_places + (column - 1), mask=is_passed_on, other=0)
        is_second = is_rank & (column >= 1 + num_places) & (column < 1 + 2 * num_places)
        from_place = column - 1 - num_places
        source = tl.cast(tl.load(neighbours + row * num_places + from_place, mask=is_second, other=0), tl.int64)
        place = tl.load(place_of_rank + row, mask=is_rank, other=0)
        found += tl.load(second + source * num_places + place, mask=is_second, other=0)
    is_assigned = is_rank & (column >= 1 + 2 * num_places) & (column < num_columns)
    expert = row * num_local + (column - 1 - 2 * num_places)
    found += tl.cast(tl.load(tokens_per_expert + expert, mask=is_assigned, other=0), tl.int32)
    places = row * num_columns + column
    tl.store(messages + places, tl.cast(found, tl.int64), mask=is_rank & (column < num_columns))


def route_message(first_W: Tensor, second_L: Tensor, tokens_per_expert_E: Tensor, ranks: RankMap) -> Tensor:
    """The message to each rank, int64 ``[W, 1 + 2P + e]``. See the twin."""
    num_ranks, num_places, num_experts = ranks.num_ranks, ranks.num_places, tokens_per_expert_E.numel()
    ways = num_ranks * num_places
    if first_W.shape != (num_ranks,) or second_L.shape != (ways,) or num_experts % num_ranks:
        raise ValueError(
            f"first_W {tuple(first_W.shape)} and second_L {tuple(second_L.shape)} must have one entry for each of "
            f"{num_ranks} ranks and {ways} ways, and the number of experts ({num_experts}) be a multiple of the ranks'"
        )
    first_W, second_L, tokens_per_expert_E = (x.contiguous() for x in (first_W, second_L, tokens_per_expert_E))
    num_columns = 1 + 2 * num_places + num_experts // num_ranks
    message_WC = first_W.new_empty((num_ranks, num_columns), dtype=torch.int64)
    config = _rows_config(first_W, num_columns, num_ranks)
    read = [(first_W, num_ranks), (tokens_per_expert_E, num_experts)]
    if ways:
        read += [(second_L, 2 * ways), (ranks.neighbours_WP, ways), (ranks.place_of_rank_W1, num_ranks)]
    launch(
        Launch(
            op="messages",
            kernel=_route_message_kernel,
            grid=(triton.cdiv(num_ranks, config.blocks["BLOCK_W"]),),
            arguments=dict(
                first=first_W,
                second=second_L if ways else None,
                tokens_per_expert=tokens_per_expert_E,
                neighbours=ranks.neighbours_WP,
                place_of_rank=ranks.place_of_rank_W1,
                messages=message_WC,
                num_ranks=num_ranks,
                num_places=num_places,
                num_local=num_experts // num_ranks,
                num_columns=num_columns,
                COLUMNS=triton.next_power_of_2(num_columns),
            ),
            config=config,
            cost=Cost(
                bytes_read=sum(x.element_size() * count for x, count in read), bytes_written=message_WC.numel() * 8
            ),
        )
    )
    return message_WC


def _rows_config(x: Tensor, num_columns: int, num_ranks: int) -> Config:
    width = triton.next_power_of_2(num_columns)
    return config_for("messages", arch=arch_of(x), dtype=torch.int32, width=width, rows=num_ranks)


@triton.jit
def _load_messages(messages, first, stride, num_ranks, num_columns, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr):
    """int32 ``[BLOCK_W, COLUMNS]``: the messages of the ranks from ``first`` on, 0 where there is none.

    Example: messages [[1, 2], [3, 4]], first 1, BLOCK_W=2 gives [[3, 4], [0, 0]].
    """
    rank = (first + tl.arange(0, BLOCK_W))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    places = tl.cast(rank, tl.int64) * stride + column
    return tl.cast(tl.load(messages + places, mask=(rank < num_ranks) & (column < num_columns), other=0), tl.int32)


@triton.jit
def _before(values, AXIS: tl.constexpr):
    """Sums of what comes before each value.

    Example: [3, 1, 2] gives [0, 3, 4].
    """
    return tl.cumsum(values, axis=AXIS) - values


@triton.jit
def _message_starts_kernel(
    messages,
    by_rank,
    by_column,
    references,
    totals,
    stride,
    num_ranks,
    num_places,
    num_columns,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program writes where the items begin that its ranks' messages count, the first one also the columns' sums.

    Example: one column, first rows of two ranks [[1], [4]]: by rank 0, 0, by column 0, 1, total 5.
    """
    column = tl.arange(0, COLUMNS)
    is_passed_on = (column >= 1) & (column < 1 + num_places)
    is_assigned = column >= 1 + 2 * num_places
    is_row = (column < 1 + 2 * num_places) & (is_passed_on == 0)

    # What all ranks count in each column, and what those before this program's do.
    start = tl.program_id(0) * BLOCK_W
    total = tl.zeros((COLUMNS,), tl.int32)
    earlier = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, num_ranks, BLOCK_W):
        found = _load_messages(messages, first, stride, num_ranks, num_columns, COLUMNS, BLOCK_W)
        sums = tl.sum(found, axis=0)
        total += sums
        earlier += tl.where(first < start, sums, 0)
    if tl.program_id(0) == 0:
        tl.store(totals + column, tl.cast(total, tl.int64), mask=column < num_columns)
    before = tl.where(is_row, _before(tl.where(is_row, total, 0), 0), 0)
    before += tl.where(is_passed_on, _before(tl.where(is_passed_on, total, 0), 0), 0)
    before += tl.where(is_assigned, _before(tl.where(is_assigned, total, 0), 0), 0) + earlier

    found = _load_messages(messages, start, stride, num_ranks, num_columns, COLUMNS, BLOCK_W)
    rank = (start + tl.arange(0, BLOCK_W))[:, None]
    places = tl.cast(rank, tl.int64) * num_columns + column[None, :]
    inside = (rank < num_ranks) & (column < num_columns)[None, :]
    tl.store(by_column + places, before[None, :] + _before(found, 0), mask=inside)

    passed_on = tl.where(is_passed_on[None, :], found, 0)
    assigned = tl.where(is_assigned[None, :], found, 0)
    own = tl.where(is_row[None, :], _before(tl.where(is_row[None, :], found, 0), 1), 0)
    of_passed_on, of_assigned = tl.sum(passed_on, axis=1), tl.sum(assigned, axis=1)
    first_passed_on = tl.sum(tl.where(is_passed_on, earlier, 0), axis=0) + _before(of_passed_on, 0)
    first_assigned = tl.sum(tl.where(is_assigned, earlier, 0), axis=0) + _before(of_assigned, 0)
    own += tl.where(is_passed_on[None, :], first_passed_on[:, None] + _before(passed_on, 1), 0)
    own += tl.where(is_assigned[None, :], first_assigned[:, None] + _before(assigned, 1), 0)
    tl.store(by_rank + places, own, mask=inside)

    rank = start + tl.arange(0, BLOCK_W)
    pairs = references + tl.cast(rank, tl.int64) * 2
    tl.store(pairs, first_passed_on + first_assigned, mask=rank < num_ranks)
    tl.store(pairs + 1, first_passed_on + of_passed_on + first_assigned, mask=rank < num_ranks)


def message_starts(message_WC: Tensor, *, num_places: int) -> MessageStarts:
    """Where what the messages count begins: see the twin, and :class:`MessageStarts`."""
    (message_WC,) = _checked(num_places, message_WC=message_WC)
    num_ranks, num_columns = message_WC.shape
    starts = MessageStarts(
        num_places=num_places,
        by_rank_WC=message_WC.new_empty((num_ranks, num_columns), dtype=torch.int32),
        by_column_WC=message_WC.new_empty((num_ranks, num_columns), dtype=torch.int32),
        references_W2=message_WC.new_empty((num_ranks, 2), dtype=torch.int32),
        totals_C=message_WC.new_empty((num_columns,)),
    )
    config = _rows_config(message_WC, num_columns, num_ranks)
    programs = triton.cdiv(num_ranks, config.blocks["BLOCK_W"])
    launch(
        Launch(
            op="messages",
            kernel=_message_starts_kernel,
            grid=(programs,),
            arguments=dict(
                messages=message_WC,
                by_rank=starts.by_rank_WC,
                by_column=starts.by_column_WC,
                references=starts.references_W2,
                totals=starts.totals_C,
                stride=message_WC.stride(0),
                num_ranks=num_ranks,
                num_places=num_places,
                num_columns=num_columns,
                COLUMNS=triton.next_power_of_2(num_columns),
            ),
            config=config,
            cost=Cost(
                bytes_read=(programs + 1) * message_WC.numel() * 8,
                bytes_written=(2 * message_WC.numel() + 2 * num_ranks) * 4 + num_columns * 8,
            ),
        )
    )
    return starts


@triton.jit
def _store_sums(sizes, values, chosen, rank, num_ranks):
    """Writes each rank's sum over the chosen columns.

    Example: values [[1, 2, 3]], chosen columns 1 and 2, rank [0]: 5.
    """
    sums = tl.sum(tl.where(chosen[None, :], values, 0), axis=1)
    tl.store(sizes + rank, tl.cast(sums, tl.int64), mask=rank < num_ranks)


@triton.jit
def _message_sizes_kernel(
    sent,
    received,
    sizes,
    sent_stride,
    received_stride,
    num_ranks,
    num_places,
    num_columns,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program writes the sums of its ranks' messages, the first one also those of the columns received.

    Example: W=1, P=0, sent [[2, 3]], received [[4, 5]]: sizes [2, 4, 3, 5, 3, 5, 5].
    """
    column = tl.arange(0, COLUMNS)
    is_passed_on = (column >= 1) & (column < 1 + num_places)
    is_second = (column >= 1 + num_places) & (column < 1 + 2 * num_places)
    is_assigned = column >= 1 + 2 * num_places
    first = tl.program_id(0) * BLOCK_W
    rank = first + tl.arange(0, BLOCK_W)
    of_ranks = sizes + 2 * num_ranks + 2 * num_places
    for side in tl.static_range(2):
        if side == 0:
            found = _load_messages(sent, first, sent_stride, num_ranks, num_columns, COLUMNS, BLOCK_W)
        else:
            found = _load_messages(received, first, received_stride, num_ranks, num_columns, COLUMNS, BLOCK_W)
        _store_sums(sizes + side * num_ranks, found, column == 0, rank, num_ranks)
        _store_sums(of_ranks + side * num_ranks, found, is_assigned, rank, num_ranks)
        _store_sums(of_ranks + (2 + side) * num_ranks, found, is_passed_on | is_assigned, rank, num_ranks)
    if tl.program_id(0) == 0:
        total = tl.zeros((COLUMNS,), tl.int32)
        for start in range(0, num_ranks, BLOCK_W):
            rows = _load_messages(received, start, received_stride, num_ranks, num_columns, COLUMNS, BLOCK_W)
            total += tl.sum(rows, axis=0)
        wide = tl.cast(total, tl.int64)
        tl.store(sizes + 2 * num_ranks + (column - 1), wide, mask=is_passed_on | is_second)
        of_experts = of_ranks + 4 * num_ranks
        tl.store(of_experts + (column - 1 - 2 * num_places), wide, mask=is_assigned & (column < num_columns))


def message_sizes(sent_WC: Tensor, received_WC: Tensor, *, num_places: int) -> Tensor:
    """What the host must know, int64, in the twin's order."""
    sent_WC, received_WC = _checked(num_places, sent_WC=sent_WC, received_WC=received_WC)
    num_ranks, num_columns = sent_WC.shape
    num_sizes = 6 * num_ranks + num_columns - 1
    sizes = sent_WC.new_empty((num_sizes,))
    config = _rows_config(sent_WC, num_columns, num_ranks)
    launch(
        Launch(
            op="messages",
            kernel=_message_sizes_kernel,
            grid=(triton.cdiv(num_ranks, config.blocks["BLOCK_W"]),),
            arguments=dict(
                sent=sent_WC,
                received=received_WC,
                sizes=sizes,
                sent_stride=sent_WC.stride(0),
                received_stride=received_WC.stride(0),
                num_ranks=num_ranks,
                num_places=num_places,
                num_columns=num_columns,
                COLUMNS=triton.next_power_of_2(num_columns),
            ),
            config=config,
            cost=Cost(bytes_read=3 * sent_WC.numel() * 8, bytes_written=num_sizes * 8),
        )
    )
    return sizes


def _checked(num_places: int, **messages: Tensor) -> tuple[Tensor, ...]:
    """The messages, each row of them contiguous."""
    shape = next(iter(messages.values())).shape
    if len(shape) != 2 or not shape[0] or shape[1] < 2 * num_places + 2:
        raise ValueError(f"messages must be [W, 1 + 2 * {num_places} + e], found {tuple(shape)}")
    for name, x in messages.items():
        if x.dtype != torch.int64 or x.shape != shape:
            raise ValueError(f"{name} ({x.dtype}, {tuple(x.shape)}) must be int64 {tuple(shape)}")
    return tuple(x if x.stride(1) == 1 else x.contiguous() for x in messages.values())
