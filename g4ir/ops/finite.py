"""Reports a NaN or an infinity, which no value of a model should be."""

from __future__ import annotations

from g4ir.errors import CheckError, WeightsError

from .types import TORCH_NAMES, torch, torch_dtype


def advice(dtype: str) -> str:
    """Return why an engine's values are not finite, and what to do."""
    return f"{TORCH_NAMES[dtype]} has the range of float32: look for damaged weights"


def require_finite(value: torch.Tensor, what: str, dtype: str) -> torch.Tensor:
    """Return the value; CheckError where a number in it is NaN or infinite. A finite sum has finite
    terms alone, and is found in a tenth of the time; of an infinite one, each term is looked at."""
    wide = value.dtype if value.element_size() > 4 else torch.float32
    if bool(value.sum(dtype=wide).isfinite()) or bool(value.isfinite().all()):
        return value
    raise not_finite(what, dtype)


def not_finite(what: str, dtype: str) -> CheckError:
    """Return the error that names a value."""
    return CheckError(f"{what}: NaN or infinite; {advice(dtype)}")


def cast(value: torch.Tensor, dtype: str, tensor: str) -> torch.Tensor:
    """Return a weight in a dtype; WeightsError where that makes it infinite."""
    made = value.to(torch_dtype(dtype))
    if dtype == "f16" and value.dtype != made.dtype and bool(made.isinf().any()):
        largest = f"{float(value.abs().max()):g} does not fit float16, which ends at 65504"
        raise WeightsError(f"{tensor}: {largest}; take --dtype bfloat16")
    return made
