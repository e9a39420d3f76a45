"""Triton kernels compiled ahead of time, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from g4ir.errors import LowerError, MissingError


def require_triton() -> Any:
    """Return triton; MissingError if it cannot be imported."""
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
    except ImportError as e:
        raise MissingError(
            f"kernels are compiled by triton, which cannot be imported ({e}): `pip install triton`"
        ) from e
    return triton


def compile_for(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Collection[str],
    capability: int,
    options: Mapping[str, int],
) -> Any:
    """Compile a kernel: `types` are Triton's types of its operands by parameter, `constants` the
    values of other parameters, `aligned` the operands that are multiples of 16.

    The signature is the kernel's own parameter list: what is in neither has its default. LowerError
    if a parameter has no value, a value no parameter, or this triton cannot compile the kernel.
    """
    triton = require_triton()
    names = [p.name for p in kernel.params]
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    fixed = {n: v for n, v in {**defaults, **constants}.items() if n not in types}
    given = {*types, *fixed}
    if given != {*names}:
        missing, unknown = sorted({*names} - given), sorted(given - {*names})
        raise LowerError(
            f"kernel {kernel.__name__}: parameters without a value {missing}, values of no "
            f"parameter {unknown}; correct the operands and constants that its launch gives"
        )
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs=fixed,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    try:
        return triton.compile(source, target=target, options=dict(options))
    except OSError:
        raise
    except Exception as e:  # each stage of the compiler has errors of its own
        said = " ".join(str(e).split())[-300:]
        raise LowerError(
            f"triton {triton.__version__} cannot compile kernel {kernel.__name__} for "
            f"sm_{capability}: {type(e).__name__}: {said}"
        ) from e
