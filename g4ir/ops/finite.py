"""Checks that values are finite, with errors that say what to do about NaN and infinity."""

from __future__ import annotations

from g4ir.errors import CheckError, WeightsError

from .types import TORCH_NAMES, torch, torch_dtype


def advice(dtype: str) -> str:
    """Return the last part of an error about values that are not finite: overflow is excluded,
    since engines compute in dtypes with the range of float32, so that the weights are suspect."""
    return f"{TORCH_NAMES[dtype]} has the range of float32: look for damaged weights"


def require_finite(value: torch.Tensor, name: str, dtype: str) -> torch.Tensor:
    """Return the value; CheckError if an element is NaN or infinite. A finite sum proves that all
    elements are finite in a tenth of the time; only otherwise each element is checked."""
    sum_dtype = value.dtype if value.element_size() > 4 else torch.float32
    if bool(value.sum(dtype=sum_dtype).isfinite()) or bool(value.isfinite().all()):
        return value
    raise not_finite(name, dtype)


def not_finite(name: str, dtype: str) -> CheckError:
    return CheckError(f"{name}: NaN or infinite; {advice(dtype)}")


def cast(value: torch.Tensor, dtype: str, tensor: str) -> torch.Tensor:
    """Return a weight in a dtype; WeightsError if a finite element overflows float16."""
    result = value.to(torch_dtype(dtype))
    if dtype == "f16" and value.dtype != result.dtype and bool(result.isinf().any()):
        largest = f"{float(value.abs().max()):g} does not fit float16, which ends at 65504"
        raise WeightsError(f"{tensor}: {largest}; take --dtype bfloat16")
    return result
