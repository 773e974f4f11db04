"""Checks of every launch in Triton's interpreter: exact bfloat16, bounds, garbage in masked lanes, order, traffic.

:func:`checked_interpreter` is on in every test of this folder. A pointer knows the argument it came from (its type
carries it), so an access must lie in *that* tensor: running into a neighbour is found. Where a launch's argument is
the ``first`` of a :class:`~xmoe.kernels.ragged.Stacked`, all its matrices are in bounds.

Lanes that a mask switches off and that have no ``other`` hold garbage, as on a GPU. int32 arithmetic that overflows
raises. Errors name the kernel and the argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import interpreter_floats
import interpreter_speed
import numpy as np
import torch
import triton.language as tl
from interpreter_arguments import Argument, Pointer, remembered
from interpreter_floats import Builder, Handle, KernelFault, Patches
from interpreter_races import Races
from torch import Tensor
from triton.runtime import interpreter

from xmoe.kernels.launch import Cost, Launch
from xmoe.kernels.ragged import Stacked

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """Some programs of a launch, by their number in ``grid``, which may be larger than the launch's own."""

    grid: Grid
    programs: list[int]


@dataclass
class LaunchTraffic:
    """What one launch loaded and stored, in elements by argument, and in bytes; atomics count as both.

    ``declared``  the launcher's Cost; None where the kernel was not started by ``xmoe.kernels.launch``
    ``numbers``   arguments that are neither tensors nor None
    """

    kernel: str
    declared: Cost | None
    numbers: frozenset[str] = frozenset()
    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    _loads: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _stores: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def loads(self) -> dict[str, dict[int, int]]:
        """How often each item of each argument was loaded, by its number; items never loaded are left out."""
        return _how_often(self._loads)

    @property
    def stores(self) -> dict[str, dict[int, int]]:
        return _how_often(self._stores)

    def count(self, argument: Argument, addresses: np.ndarray, *, loaded: bool, stored: bool) -> None:
        places = argument.items(addresses)["places"]
        if loaded:
            self.loaded[argument.name] += addresses.size
            self.bytes_read += addresses.size * argument.item_size
            self._loads.setdefault(argument.name, []).append(places)
        if stored:
            self.stored[argument.name] += addresses.size
            self.bytes_written += addresses.size * argument.item_size
            self._stores.setdefault(argument.name, []).append(places)


def _how_often(places: dict[str, list[np.ndarray]]) -> dict[str, dict[int, int]]:
    return {name: dict(Counter(np.concatenate(found).tolist())) for name, found in places.items()}


@dataclass
class _Running:
    """The launch that runs now."""

    kernel: str
    arguments: dict[Any, Argument]
    traffic: LaunchTraffic
    chosen: Chosen | None = None
    program: int = 0
    turn: int = 0
    races: Races | None = None


@dataclass
class _Settings:
    order: str = "forward"
    races: bool = False
    running: _Running | None = None
    declared: Launch | None = None
    allowed: list[Argument] = field(default_factory=list)
    watchers: list[list[LaunchTraffic]] = field(default_factory=list)
    choose: Callable[[str, Grid], Chosen | None] | None = None


_NOW = _Settings()


@contextlib.contextmanager
def checked_interpreter() -> Iterator[None]:
    """Everything this module checks, for kernels that run inside."""
    replaced: Patches = []
    try:
        for owner, name, value in [*interpreter_floats.patches(), *interpreter_speed.patches(), *_patches()]:
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


@contextlib.contextmanager
def _setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(_NOW, name)
    setattr(_NOW, name, value)
    try:
        yield
    finally:
        setattr(_NOW, name, before)


def program_order(order: str) -> contextlib.AbstractContextManager[None]:
    """Programs of launches inside run ``forward``, ``reversed`` or in a ``random`` order."""
    assert order in ("forward", "reversed", "random")
    return _setting("order", order)


def only_programs(choose: Callable[[str, Grid], Chosen | None]) -> contextlib.AbstractContextManager[None]:
    """Of launches inside only the programs run that ``choose(kernel, grid)`` names; all where it gives None."""
    return _setting("choose", choose)


def race_check() -> contextlib.AbstractContextManager[None]:
    """Launches inside fail where two programs touch one item and one of them writes it, where lanes of one store
    disagree, and where a program reads back what it wrote without a barrier. Atomics are left out."""
    return _setting("races", True)


def allowed(*tensors: Tensor) -> contextlib.AbstractContextManager[None]:
    """Launches inside may touch ``tensors`` through pointers of any origin."""
    extra = [Argument.of(f"allowed[{index}]", x) for index, x in enumerate(tensors)]
    return _setting("allowed", [*_NOW.allowed, *extra])


@contextlib.contextmanager
def traffic() -> Iterator[list[LaunchTraffic]]:
    """Collects what each launch inside really loads and stores."""
    found: list[LaunchTraffic] = []
    with _setting("watchers", [*_NOW.watchers, found]):
        yield found


def poisoned_integers(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """``allocate`` with a large number in integer results."""

    @functools.wraps(allocate)
    def allocate_garbage(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        kind = tensor.dtype
        if not kind.is_floating_point and not kind.is_complex and kind != torch.bool and tensor.device.type != "meta":
            tensor.fill_(torch.iinfo(kind).max // 3)
        return tensor

    return allocate_garbage


def _garbage(dtype: np.dtype, is_bfloat16: bool) -> Any:
    if is_bfloat16:
        return 0x7FC0
    if dtype.kind == "f":
        return np.nan
    return True if dtype == np.bool_ else np.iinfo(dtype).max // 3


def _touch(handle: Any, mask: np.ndarray, verb: str) -> tuple[_Running, Argument, np.ndarray] | None:
    """Bounds check of one access; returns the launch, the argument, and the addresses that the mask lets through."""
    running = _NOW.running
    if running is None:
        return None
    addresses = handle.data[mask] if mask.shape == handle.data.shape else np.broadcast_to(handle.data, mask.shape)[mask]
    if not addresses.size:
        return None
    argument = getattr(handle.dtype, "argument", None)
    if argument is not None:
        own = [argument]
    else:  # a pointer that was itself loaded or cast
        own = [one for one in running.arguments.values() if one.holds(addresses[:1])]
    for one in [*own, *_NOW.allowed]:
        if one.holds(addresses):
            return running, one, addresses
    whose = argument.describe() if argument else "any argument"
    start = argument.start if argument else 0
    offsets = addresses.astype(np.int64) - start
    reach = f"bytes {offsets.min()} to {offsets.max()}"
    raise KernelFault(f"{running.kernel}, program {running.program}, {verb} out of bounds of {whose}: {reach}")


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(builder: Any, pointers: Any, mask: Any, other: Any, cache: Any, volatile: Any) -> Any:
        touched = _touch(pointers, mask.data, "loads")
        if touched:
            running, argument, addresses = touched
            if _NOW.watchers:
                running.traffic.count(argument, addresses, loaded=True, stored=False)
            if running.races:
                running.races.load(running.program, **argument.items(addresses))
        if other is None and not mask.data.all():
            kind = pointers.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            other = Handle(np.full(pointers.data.shape, _garbage(dtype, kind == tl.bfloat16), dtype), kind)
        return original(builder, pointers, mask, other, cache, volatile)

    return load


def _store(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(builder: Any, pointers: Any, value: Any, mask: Any, cache: Any) -> Any:
        touched = _touch(pointers, mask.data, "stores")
        if touched:
            running, argument, addresses = touched
            if _NOW.watchers:
                running.traffic.count(argument, addresses, loaded=False, stored=True)
            if running.races:
                values = np.broadcast_to(value.data, mask.data.shape)[mask.data]
                running.races.store(running.program, **argument.items(addresses), values=values)
        return original(builder, pointers, value, mask, cache)

    return store


def _atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    def atomic(builder: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        touched = _touch(pointers, mask.data, "atomically updates")
        if touched:
            running, argument, addresses = touched
            running.traffic.count(argument, addresses, loaded=True, stored=True)
        return original(builder, op, pointers, value, mask, sem, scope)

    return atomic


def _barrier(builder: Any) -> None:
    if _NOW.running is not None and _NOW.running.races is not None:
        _NOW.running.races.barrier()


def _wrapping(original: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Integer arithmetic that says so when an int32 result does not fit."""

    def compute(builder: Any, lhs: Any, rhs: Any) -> Any:
        found = original(builder, lhs, rhs)
        if found.data.dtype == np.int32:
            wide = op(lhs.data, rhs.data, dtype=np.int64)
            if wide.size and (wide.min() < -(2**31) or wide.max() >= 2**31):
                kernel = _NOW.running.kernel if _NOW.running else "a kernel"
                raise KernelFault(f"{kernel}: int32 {op.__name__} overflows: {wide.min()} to {wide.max()}")
        return found

    return compute


def _set_grid_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_grid_index(builder: Any, *index: int) -> None:
        running = _NOW.running
        if running is None:
            original(builder, *index)
            return
        if running.chosen is None:
            running.chosen = Chosen(builder.grid_dim, _places(math.prod(builder.grid_dim)))
        running.program = running.chosen.programs[running.turn]
        running.turn += 1
        builder.grid_dim = running.chosen.grid
        builder.grid_idx = tuple(int(i) for i in np.unravel_index(running.program, running.chosen.grid))

    return set_grid_index


def _places(num_programs: int) -> list[int]:
    if _NOW.order == "random":
        return list(np.random.default_rng(num_programs).permutation(num_programs).tolist())
    return list(range(num_programs)) if _NOW.order == "forward" else list(range(num_programs))[::-1]


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(argument: Any) -> Any:
        found = original(argument)
        if _NOW.running is None or not isinstance(argument, Tensor):
            return found
        kind = Pointer(found.dtype.element_ty, _NOW.running.arguments[_key(argument)])
        return tl.tensor(Handle(found.handle.data, kind), kind)

    return convert


def _key(x: Tensor) -> Any:
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(kernel: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        arguments: dict[Any, Argument] = {}
        for name, x in named.items():
            if isinstance(x, Tensor):
                arguments.setdefault(_key(x), Argument.of(name, x))
        call, _NOW.declared = _NOW.declared, None
        ours = call is not None and call.kernel is kernel
        numbers = frozenset(name for name, x in named.items() if x is not None and not isinstance(x, Tensor))
        record = LaunchTraffic(kernel.__name__, call.cost if call and ours else None, numbers)
        for watcher in _NOW.watchers:
            watcher.append(record)
        races = Races(kernel.__name__) if _NOW.races else None
        running = _Running(kernel.__name__, arguments, record, races=races)
        if _NOW.choose is not None and (chosen := _NOW.choose(kernel.__name__, grid)) is not None:
            running.chosen = Chosen((*chosen.grid, 1, 1)[:3], chosen.programs)
            grid = (len(chosen.programs),)
        with _setting("running", running), np.errstate(all="ignore"):
            try:
                return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            except interpreter.InterpreterError as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, KernelFault):
                    cause = cause.__cause__
                if cause is None:
                    raise
                raise cause from None

    return run


def _keywords(original: Callable[..., Any]) -> Callable[..., Any]:
    def keywords(call: Launch) -> dict[str, Any]:
        _NOW.declared = call  # read by the launch that follows at once
        return original(call)

    return keywords


def _patches() -> Patches:
    # Triton's own overflow check computes for every operation what it then, without debug, does not look at.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    found: Patches = [
        (interpreter.InterpretedFunction, "run", _run(interpreter.InterpretedFunction.run)),
        (interpreter, "_implicit_cvt", _convert(interpreter._implicit_cvt)),
        (interpreter.interpreter_builder, "options", options),
        (Launch, "keywords", _keywords(Launch.keywords)),
        (Stacked, "__init__", remembered(Stacked.__init__)),
        (Builder, "set_grid_idx", _set_grid_index(Builder.set_grid_idx)),
        (Builder, "create_masked_load", _load(Builder.create_masked_load)),
        (Builder, "create_masked_store", _store(Builder.create_masked_store)),
        (Builder, "create_atomic_rmw", _atomic(Builder.create_atomic_rmw)),
        (Builder, "create_barrier", _barrier),
    ]
    operations = {"create_add": np.add, "create_sub": np.subtract, "create_mul": np.multiply}
    found += [(Builder, name, _wrapping(getattr(Builder, name), op)) for name, op in operations.items()]
    return found
