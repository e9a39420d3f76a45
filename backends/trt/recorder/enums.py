"""The enums of the module, and what differs between its versions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch


class ApiEnum(Enum):
    """An enum as the bindings have them: no int, but turned into one by `int`."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


# --- networks ---------------------------------------------------------------------------------


class DataType(ApiEnum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4, E8M0 = range(12)


class UnaryOperation(ApiEnum):
    EXP, LOG, SQRT, RECIP, ABS, NEG, SIN, COS, TAN, SINH, COSH, ASIN, ACOS, ATAN = range(14)
    ASINH, ACOSH, ATANH, CEIL, FLOOR, ERF, NOT, SIGN, ROUND, ISINF, ISNAN = range(14, 25)


class ElementWiseOperation(ApiEnum):
    SUM, PROD, MAX, MIN, SUB, DIV, POW, FLOOR_DIV, AND, OR, XOR, EQUAL, GREATER, LESS = range(14)


class ActivationType(ApiEnum):
    RELU, SIGMOID, TANH, LEAKY_RELU, ELU, SELU, SOFTSIGN, SOFTPLUS, CLIP = range(9)
    HARD_SIGMOID, SCALED_TANH, THRESHOLDED_RELU, GELU_ERF, GELU_TANH = range(9, 14)


class MatrixOperation(ApiEnum):
    NONE, TRANSPOSE, VECTOR = range(3)


class ReduceOperation(ApiEnum):
    SUM, PROD, MAX, MIN, AVG, NONE = range(6)


class TopKOperation(ApiEnum):
    MAX, MIN = range(2)


class GatherMode(ApiEnum):
    DEFAULT, ELEMENT, ND = range(3)


class SampleMode(ApiEnum):
    STRICT_BOUNDS, WRAP, CLAMP, FILL, REFLECT = range(5)


class KVCacheMode(ApiEnum):
    LINEAR = 0


class AttentionNormalizationOp(ApiEnum):
    NONE, SOFTMAX = range(2)


class CausalMaskKind(ApiEnum):
    NONE, UPPER_LEFT, LOWER_RIGHT = range(3)


class CollectiveOperation(ApiEnum):
    """The operations of both versions; the newer one has three more."""

    ALL_REDUCE, ALL_GATHER, BROADCAST, REDUCE, REDUCE_SCATTER = range(5)


class TensorLocation(ApiEnum):
    DEVICE, HOST = range(2)


# --- builder and runtime ----------------------------------------------------------------------


class Severity(ApiEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class MemoryPoolType(ApiEnum):
    WORKSPACE, DLA_MANAGED_SRAM, DLA_LOCAL_DRAM, DLA_GLOBAL_DRAM = range(4)
    TACTIC_DRAM, TACTIC_SHARED_MEMORY = range(4, 6)


class HardwareCompatibilityLevel(ApiEnum):
    NONE, AMPERE_PLUS, SAME_COMPUTE_CAPABILITY = range(3)


class ProfilingVerbosity(ApiEnum):
    LAYER_NAMES_ONLY, NONE, DETAILED = range(3)


class ExecutionContextAllocationStrategy(ApiEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class BuilderFlag(ApiEnum):
    """The flags that are used; each version has its own numbers."""


class BuilderFlag10(BuilderFlag):
    FP16, REFIT, TF32, STRIP_PLAN, REFIT_IDENTICAL = 0, 4, 6, 19, 20
    WEIGHT_STREAMING, REFIT_INDIVIDUAL = 21, 23


class BuilderFlag11(BuilderFlag):
    REFIT, TF32, STRIP_PLAN, REFIT_IDENTICAL = 4, 6, 18, 19
    WEIGHT_STREAMING, REFIT_INDIVIDUAL = 20, 22


class PreviewFeature(ApiEnum):
    """The features of builders that are tried out; each version has its own numbers."""


class PreviewFeature10(PreviewFeature):
    PROFILE_SHARING_0806, ALIASED_PLUGIN_IO_10_03 = range(2)
    RUNTIME_ACTIVATION_RESIZE_10_10, MULTIDEVICE_RUNTIME_10_16 = range(2, 4)


class PreviewFeature11(PreviewFeature):
    ALIASED_PLUGIN_IO_10_03, RUNTIME_ACTIVATION_RESIZE_10_10 = range(2)


class NetworkDefinitionCreationFlag10(ApiEnum):
    EXPLICIT_BATCH, STRONGLY_TYPED = range(2)
    PREFER_JIT_PYTHON_PLUGINS, PREFER_AOT_PYTHON_PLUGINS = range(2, 4)


class NetworkDefinitionCreationFlag11(ApiEnum):
    STRONGLY_TYPED, PREFER_JIT_PYTHON_PLUGINS, PREFER_AOT_PYTHON_PLUGINS = range(3)


#: what torch has of the element types; others are not recorded
TORCH: Mapping[Any, torch.dtype] = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT8: torch.int8,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.FP8: torch.float8_e4m3fn,
}
#: the module's short names, which but for `fp8` are those of numpy and torch
SHORT: Mapping[str, Any] = {
    "fp8" if kind is DataType.FP8 else str(dtype).removeprefix("torch."): kind
    for kind, dtype in TORCH.items()
}
