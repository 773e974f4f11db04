"""Autograd's graph, read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def nodes_between(results: Iterable[Tensor], ends: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes that backward comes by on its way from ``results``, each once, those of ``ends`` and beyond left out.

    Example: of ``y = (x * w).exp()`` between y and x: ExpBackward, MulBackward and, ``w`` being a leaf, its
    AccumulateGrad, the node whose ``variable`` is ``w``.
    """
    ends = list(ends)
    leaves = {id(end) for end in ends if end.grad_fn is None}
    seen = {end.grad_fn for end in ends}
    ahead = [result.grad_fn for result in results]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen or id(getattr(node, "variable", None)) in leaves:
            continue
        seen.add(node)
        yield node
        ahead += [following for following, _ in node.next_functions]
