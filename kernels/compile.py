"""Compiles a recorded launch for any architecture, on a machine without a GPU.

The signature, the constexprs and the alignment of every argument are those the just-in-time compiler would find for
the launch's own arguments; only the target is given. What is left out is ``tt.pointer_range``, which Triton adds to
tensors below 2 GB: buffers of a real layer are larger, so the code that addresses 64 bits is the one to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from .launch import WARP_SIZE, WAVE_SIZE, Launch, compiler_knobs
from .tuning import is_amd


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """``assembly``  amdgcn or PTX text
    ``binary``       machine code, as a hsaco or cubin file
    ``shared_bytes`` LDS (shared memory) of one workgroup, launch-time allocation included
    ``metadata``     the compiler's own, by name
    """

    arch: str
    assembly: str
    binary: bytes
    shared_bytes: int
    metadata: Mapping[str, Any]


def target_of(arch: str) -> GPUTarget:
    """``gfx90a`` and the like, or ``sm_90`` and the like."""
    if is_amd(arch):
        return GPUTarget("hip", arch, WAVE_SIZE)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), WARP_SIZE)


def compile_launch(call: Launch, arch: str) -> Compiled:
    """Compiles ``call`` for ``arch``. Raises RuntimeError under ``TRITON_INTERPRET=1``, else the compiler's errors."""
    function = call.kernel
    if not isinstance(function, JITFunction):
        raise RuntimeError("kernels were defined under TRITON_INTERPRET=1 and cannot be compiled in this process")
    target = target_of(arch)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, keywords = bind(**call.keywords())
    options, signature, constexprs, attributes = function._pack_args(backend, keywords, bound, specialization, keywords)
    attributes = {place: _without_pointer_range(found) for place, found in attributes.items()}
    source = ASTSource(function, signature, constexprs, attributes)
    with compiler_knobs(call.config.knobs):
        found = triton.compile(source, target=target, options=options.__dict__)
    metadata = found.metadata._asdict()
    return Compiled(
        arch=arch,
        assembly=found.asm["amdgcn" if is_amd(arch) else "ptx"],
        binary=found.asm["hsaco" if is_amd(arch) else "cubin"],
        shared_bytes=int(metadata["shared"]),
        metadata=metadata,
    )


def _without_pointer_range(attributes: list[list[Any]]) -> list[list[Any]]:
    return [attribute for attribute in attributes if attribute[0] != "tt.pointer_range"]
