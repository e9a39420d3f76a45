"""Checks that values are finite, with errors that say what to do about NaN and infinity."""

from __future__ import annotations

from g4ir.errors import CheckError, WeightsError

from .types import TORCH_NAMES, torch, torch_dtype


def advice(dtype: str) -> str:
    """Return the last part of an error about values that are not finite. It suspects the weights,
    not overflow, since engines compute in dtypes with the range of float32."""
    return f"{TORCH_NAMES[dtype]} rarely overflows: look for damaged weights"


def require_finite(value: torch.Tensor, name: str, dtype: str) -> torch.Tensor:
    """Return the value; CheckError if an element is NaN or infinite. Elements are checked only if
    their sum is not finite: the sum takes a tenth of the time."""
    sum_dtype = value.dtype if value.element_size() > 4 else torch.float32
    if bool(value.sum(dtype=sum_dtype).isfinite()) or bool(value.isfinite().all()):
        return value
    raise not_finite(name, dtype)


def not_finite(name: str, dtype: str) -> CheckError:
    return CheckError(f"{name}: NaN or infinite; {advice(dtype)}")


def cast(value: torch.Tensor, dtype: str, tensor: str) -> torch.Tensor:
    """Return a weight in a dtype; WeightsError if an element overflows in a cast to float16, or is
    infinite before it."""
    result = value.to(torch_dtype(dtype))
    if dtype == "f16" and value.dtype != result.dtype and bool((over := result.isinf()).any()):
        largest = f"{float(value[over].abs().max()):g} does not fit float16, which ends at 65504"
        raise WeightsError(f"{tensor}: {largest}; give --dtype bfloat16 (GGUF: BF16)")
    return result
