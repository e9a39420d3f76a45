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


def _enum(name: str, members: str) -> Any:
    """Return an enum of members with numbers, or numbered from 0."""
    pairs = [(word.split("=") + [str(i)])[:2] for i, word in enumerate(members.split())]
    return ApiEnum(name, {n: int(number) for n, number in pairs}, module=__name__)  # type: ignore[call-arg]


DataType = _enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4 E8M0")
Severity = _enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")
#: name -> members that are used, as `_enum` takes them
_MEMBERS = {
    "UnaryOperation": "EXP LOG SQRT NEG=5 ERF=19 NOT=20",
    "ElementWiseOperation": "SUM PROD MAX MIN SUB DIV POW FLOOR_DIV AND OR XOR EQUAL GREATER LESS",
    "ActivationType": "SIGMOID=1 TANH=2 GELU_ERF=12 GELU_TANH=13",
    "MatrixOperation": "NONE TRANSPOSE VECTOR",
    "ReduceOperation": "SUM PROD MAX MIN AVG NONE",
    "TopKOperation": "MAX MIN",
    "GatherMode": "DEFAULT ELEMENT ND",
    "SampleMode": "STRICT_BOUNDS WRAP CLAMP FILL REFLECT",
    "KVCacheMode": "LINEAR",
    "AttentionNormalizationOp": "NONE SOFTMAX",
    "CollectiveOperation": "ALL_REDUCE ALL_GATHER BROADCAST REDUCE REDUCE_SCATTER",
    "TensorLocation": "DEVICE HOST",
    "MemoryPoolType": "WORKSPACE TACTIC_SHARED_MEMORY=5",
    "HardwareCompatibilityLevel": "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY",
    "ProfilingVerbosity": "LAYER_NAMES_ONLY NONE DETAILED",
    "ExecutionContextAllocationStrategy": "STATIC ON_PROFILE_CHANGE USER_MANAGED",
}
ENUMS: Mapping[str, Any] = {
    "DataType": DataType,
    **{name: _enum(name, members) for name, members in _MEMBERS.items()},
}
#: version -> the enums that it numbers in its own way, as far as they are used
VERSIONED: Mapping[str, Mapping[str, Any]] = {
    version: {name: _enum(name, members) for name, members in own.items()}
    for version, own in {
        "11.4.0": {
            "BuilderFlag": "TF32=6 STRIP_PLAN=18 REFIT_IDENTICAL=19 WEIGHT_STREAMING=20",
            "PreviewFeature": "ALIASED_PLUGIN_IO_10_03=0",
            "NetworkDefinitionCreationFlag": "STRONGLY_TYPED=0",
            "CausalMaskKind": "NONE UPPER_LEFT LOWER_RIGHT",
        },
    }.items()
}

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
    DataType.INT4: torch.int8,  # once it is unpacked
}
