"""A static check of addresses: what would overflow 32 bits in a large layer, found in the kernels' source.

Every value of a kernel is one of

    bounded   numbers that the source bounds: literals, block sizes and other constexprs, ``tl.arange``, and what
              ``%``, ``&`` or ``tl.minimum`` keeps below one of these
    size      a scalar argument of the kernel: a width, a stride, a count; and what is computed of these and of
              bounded numbers, such as an offset within a tile of rows
    index     a program id, a loop's variable, a loaded number, and arithmetic of these: a row, an expert, a column

and either 64 bits *wide* (after ``tl.cast(x, tl.int64)``, or joined with a wide value) or not. A product of two
factors that are not bounded is *narrow* if neither is wide. So is an offset that grows in a loop by a size and is not
wide. Narrow values must not reach an address: not through sums, variables, casts that come too late, or the functions
that a kernel calls, which are followed with the arguments they are given.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

BOUNDED, SIZE, INDEX = range(3)
ACCESSES = {"load": "loads", "store": "stores"}
REDUCTIONS = {"argmax", "argmin", "histogram"}


@dataclass(frozen=True)
class Value:
    """``narrow``  products that overflow, as ``line N: source``; ``root`` the leftmost argument of a sum"""

    kind: int = BOUNDED
    wide: bool = False
    narrow: frozenset[str] = frozenset()
    root: str | None = None

    def joined(self, *others: Value) -> Value:
        """Of the larger kind, wide if one is: what a sum of them is."""
        values = [self, *others]
        return Value(
            kind=max(value.kind for value in values),
            wide=any(value.wide for value in values),
            narrow=frozenset().union(*[value.narrow for value in values]),
            root=self.root,
        )


Result = Value | tuple["Result", ...]


def flat(result: Result) -> Value:
    if isinstance(result, Value):
        return result
    first, *others = [flat(one) for one in result] or [Value()]
    return first.joined(*others)


def merged(a: Result, b: Result) -> Result:
    """What a variable is after two branches: wide only if it is in both, or a bounded number in one."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(merged(x, y) for x, y in zip(a, b, strict=True))
    x, y = flat(a), flat(b)
    wide = all(value.wide for value in (x, y) if value.kind != BOUNDED) and (x.wide or y.wide)
    return replace(x.joined(y), wide=wide, root=x.root or y.root)


@dataclass(frozen=True)
class Function:
    """A function that Triton compiles."""

    file: str
    node: ast.FunctionDef

    @property
    def parameters(self) -> list[ast.arg]:
        return [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]


def jit_functions(sources: Mapping[str, str]) -> dict[str, Function]:
    """Every ``@triton.jit`` function of the files by name. Raises where two share a name."""
    found: dict[str, Function] = {}
    for file, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list):
                assert node.name not in found, f"{file} and {found[node.name].file} both define {node.name}"
                found[node.name] = Function(file, node)
    return found


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "jit")


def kernel_sources(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def find_narrow_addresses(functions: Mapping[str, Function]) -> list[str]:
    """Every access through a narrow product, as a sentence."""
    found: dict[str, None] = {}
    for name, pointers in pointer_arguments(functions).items():
        run = _Run(functions, pointers)
        run.enter(functions[name])
        found.update(dict.fromkeys(run.found))
    return list(found)


def pointer_arguments(functions: Mapping[str, Function]) -> dict[str, set[str]]:
    """Of every function that no other calls: the arguments that an access starts from, the leftmost of its sum.

    These are taken for pointers, which are 64 bits wide: whoever knows the launches checks that they are tensors.
    """
    called = {node.func.id for one in functions.values() for node in ast.walk(one.node) if _is_named_call(node)}
    found = {}
    for name, function in functions.items():
        if name not in called:  # the others are followed from their callers
            run = _Run(functions, set())
            run.enter(function)
            found[name] = run.roots
    return found


def _is_named_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@dataclass
class _Run:
    """One walk through a kernel and the functions it calls."""

    functions: Mapping[str, Function]
    pointers: set[str]
    roots: set[str] = field(default_factory=set)
    found: list[str] = field(default_factory=list)

    def enter(self, function: Function) -> None:
        given = {
            parameter.arg: Value(kind=SIZE, wide=parameter.arg in self.pointers, root=parameter.arg)
            for parameter in function.parameters
        }
        self.call(function, given)

    def call(self, function: Function, given: Mapping[str, Result]) -> Result:
        names: dict[str, Result] = {}
        for parameter in function.parameters:
            constant = parameter.annotation is not None and "constexpr" in ast.unparse(parameter.annotation)
            names[parameter.arg] = Value() if constant else given.get(parameter.arg, Value())
        frame = _Frame(self, function, names)
        frame.block(function.node.body)
        result: Result = Value()
        for index, value in enumerate(frame.returned):
            result = merged(result, value) if index else value
        return result


@dataclass
class _Frame:
    run: _Run
    function: Function
    names: dict[str, Result]
    returned: list[Result] = field(default_factory=list)
    loops: int = 0

    def where(self, node: ast.AST) -> str:
        return f"{self.function.file}, line {node.lineno}: {ast.unparse(node)}"

    # Statements

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, self.value(node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, self.grown(node))
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned.append(self.value(node.value))
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.If):
            self.value(node.test)
            before = dict(self.names)
            self.block(node.body)
            after, self.names = self.names, before
            self.block(node.orelse)
            self.merge(after)
        elif isinstance(node, ast.For | ast.While):
            self.loop(node)
        elif isinstance(node, ast.With):
            self.block(node.body)
        else:
            assert isinstance(node, ast.Pass | ast.Assert | ast.Return), f"{self.where(node)}: not understood"

    def loop(self, node: ast.For | ast.While) -> None:
        self.loops += 1
        for _ in range(4):  # as many times as a kind can grow
            before = dict(self.names)
            if isinstance(node, ast.For):
                self.assign(node.target, self.steps(node.iter))
            else:
                self.value(node.test)
            self.block(node.body)
            self.merge(before)
        self.loops -= 1

    def steps(self, node: ast.expr) -> Value:
        bounds = flat(tuple(self.value(argument) for argument in node.args)) if isinstance(node, ast.Call) else Value()
        return replace(bounds, kind=BOUNDED if bounds.kind == BOUNDED else INDEX, root=None)

    def merge(self, other: Mapping[str, Result]) -> None:
        for name, value in other.items():
            self.names[name] = merged(self.names[name], value) if name in self.names else value

    def assign(self, target: ast.expr, value: Result) -> None:
        if isinstance(target, ast.Tuple):
            values = value if isinstance(value, tuple) else (value,) * len(target.elts)
            for part, one in zip(target.elts, values, strict=True):
                self.assign(part, one)
        elif isinstance(target, ast.Name):
            self.names[target.id] = value

    def grown(self, node: ast.AugAssign) -> Value:
        old, step = flat(self.value(node.target)), flat(self.value(node.value))
        found = self.operation(node, node.op, old, step)
        if self.loops and isinstance(node.op, ast.Add | ast.Sub):
            grows = step.kind == SIZE and not found.wide
            narrow = found.narrow | {self.where(node)} if grows else found.narrow
            return replace(found, kind=max(found.kind, INDEX if step.kind == BOUNDED else step.kind), narrow=narrow)
        return found

    # Expressions

    def value(self, node: ast.expr) -> Result:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Value())
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(one) for one in node.elts)
        if isinstance(node, ast.BinOp):
            return self.operation(node, node.op, flat(self.value(node.left)), flat(self.value(node.right)))
        if isinstance(node, ast.IfExp):
            return merged(self.value(node.body), self.value(node.orelse))
        if isinstance(node, ast.UnaryOp):
            return self.value(node.operand)
        if isinstance(node, ast.Subscript):
            found = self.value(node.value)
            constant = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int)
            return found[node.slice.value] if isinstance(found, tuple) and constant else flat(found)
        if isinstance(node, ast.Call):
            return self.called(node)
        if isinstance(node, ast.Compare | ast.BoolOp):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child)
            return Value()
        return Value()  # literals, attributes such as out.dtype.element_ty

    def operation(self, node: ast.expr | ast.AugAssign, op: ast.operator, a: Value, b: Value) -> Value:
        both = a.joined(b)
        if isinstance(op, ast.Mult | ast.LShift):
            if BOUNDED not in (a.kind, b.kind) and not both.wide:
                both = replace(both, narrow=both.narrow | {self.where(node)})
            return replace(both, root=None)
        if isinstance(op, ast.Mod | ast.BitAnd) and BOUNDED in (a.kind, b.kind):
            return Value(wide=both.wide)
        if isinstance(op, ast.FloorDiv | ast.RShift):
            return replace(both, kind=a.kind, root=None)
        return both

    def called(self, node: ast.Call) -> Result:
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Name) and name in self.run.functions:
            function = self.run.functions[name]
            given = dict(zip([p.arg for p in function.parameters], map(self.value, node.args), strict=False))
            given.update({keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg})
            return self.run.call(function, given)
        owner, _, method = name.rpartition(".")
        arguments = [self.value(argument) for argument in node.args]
        options = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        if owner == "tl":
            return self.builtin(node, method, arguments, options)
        # A method of a tensor, such as x.to(tl.int64).
        own = flat(self.value(node.func.value)) if isinstance(node.func, ast.Attribute) else Value()
        return self.cast(own, node.args[0]) if method == "to" and node.args else own.joined(*map(flat, arguments))

    def builtin(
        self, node: ast.Call, name: str, arguments: list[Result], options: Mapping[str | None, Result]
    ) -> Result:
        values = [flat(argument) for argument in [*arguments, *options.values()]]
        if name in ("load", "store") or name.startswith("atomic_"):
            return self.access(node, name, values[0])
        if name in ("program_id", "num_programs"):
            return Value(kind=INDEX)
        if name == "cast":
            return self.cast(values[0], node.args[1])
        if name == "minimum" and any(value.kind == BOUNDED for value in values):
            return Value(wide=any(value.wide for value in values))
        if name in ("cdiv", "multiple_of", "max_contiguous", "broadcast_to", "reshape", "expand_dims"):
            return values[0]
        if name == "where":
            return merged(arguments[1], arguments[2])
        if name in REDUCTIONS:
            return Value(kind=INDEX)
        if name in ("sum", "cumsum"):
            return replace(values[0], kind=INDEX, root=None)
        return values[0].joined(*values[1:]) if values else Value()

    def cast(self, value: Value, kind: ast.expr) -> Value:
        return replace(value, wide=ast.unparse(kind) in ("tl.int64", "tl.uint64"))

    def access(self, node: ast.Call, name: str, pointer: Value) -> Value:
        if pointer.root is not None:
            self.run.roots.add(pointer.root)
        for product in sorted(pointer.narrow):
            self.run.found.append(f"{product} is not 64 bits wide where line {node.lineno} {ACCESSES.get(name, name)}")
        return Value(kind=INDEX)


def masked_loads_without_other(functions: Mapping[str, Function]) -> Iterator[str]:
    """Loads whose masked lanes are undefined on a GPU."""
    for function in functions.values():
        for node in ast.walk(function.node):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
                given = {keyword.arg for keyword in node.keywords}
                if (len(node.args) > 1 or "mask" in given) and len(node.args) < 3 and "other" not in given:
                    yield f"{function.file}, line {node.lineno}: {ast.unparse(node)} has a mask and no other"
