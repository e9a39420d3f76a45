"""The enums of the module, and what differs between its versions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class ApiEnum(Enum):
    """An enum as the bindings have them: no int, but turned into one by `int`."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class DataType(ApiEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10
    E8M0 = 11


def _enum(name: str, members: str) -> Any:
    """Members numbered in the order of the bindings."""
    return ApiEnum(name, {m: i for i, m in enumerate(members.split())})  # type: ignore[call-arg]


class UnaryOperation(ApiEnum):
    (
        EXP,
        LOG,
        SQRT,
        RECIP,
        ABS,
        NEG,
        SIN,
        COS,
        TAN,
        SINH,
        COSH,
        ASIN,
        ACOS,
        ATAN,
        ASINH,
        ACOSH,
        ATANH,
        CEIL,
        FLOOR,
        ERF,
        NOT,
        SIGN,
        ROUND,
        ISINF,
        ISNAN,
    ) = range(25)


class ElementWiseOperation(ApiEnum):
    (
        SUM,
        PROD,
        MAX,
        MIN,
        SUB,
        DIV,
        POW,
        FLOOR_DIV,
        AND,
        OR,
        XOR,
        EQUAL,
        GREATER,
        LESS,
    ) = range(14)


class ActivationType(ApiEnum):
    (
        RELU,
        SIGMOID,
        TANH,
        LEAKY_RELU,
        ELU,
        SELU,
        SOFTSIGN,
        SOFTPLUS,
        CLIP,
        HARD_SIGMOID,
        SCALED_TANH,
        THRESHOLDED_RELU,
        GELU_ERF,
        GELU_TANH,
    ) = range(14)


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


class TensorLocation(ApiEnum):
    DEVICE, HOST = range(2)


_EVERY: Mapping[str, Any] = {
    e.__name__: e
    for e in (
        DataType,
        UnaryOperation,
        ElementWiseOperation,
        ActivationType,
        MatrixOperation,
        ReduceOperation,
        TopKOperation,
        GatherMode,
        SampleMode,
        KVCacheMode,
        AttentionNormalizationOp,
        TensorLocation,
    )
}
_SHORT = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
    "uint8": "UINT8",
    "fp8": "FP8",
}


class NetworkDefinitionCreationFlag(ApiEnum):
    STRONGLY_TYPED, PREFER_JIT_PYTHON_PLUGINS, PREFER_AOT_PYTHON_PLUGINS = range(3)


class NetworkDefinitionCreationFlag10(ApiEnum):
    """As of 10."""

    (
        EXPLICIT_BATCH,
        STRONGLY_TYPED,
        PREFER_JIT_PYTHON_PLUGINS,
        PREFER_AOT_PYTHON_PLUGINS,
    ) = range(4)


#: version -> name -> enum
NAMES: Mapping[str, Mapping[str, Any]] = {
    "10.16.1": {
        **_EVERY,
        **{short: DataType[name] for short, name in _SHORT.items()},
        "NetworkDefinitionCreationFlag": NetworkDefinitionCreationFlag10,
    },
    "11.4.0": {
        **_EVERY,
        **{short: DataType[name] for short, name in _SHORT.items()},
        "CausalMaskKind": CausalMaskKind,
        "NetworkDefinitionCreationFlag": NetworkDefinitionCreationFlag,
    },
}
