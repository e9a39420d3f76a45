"""Lists the types that tensors of GGUF files have: how many numbers a block holds, in how many
bytes (ggml's `ggml_type` and `type_traits`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A type: its name, the numbers and bytes of a block; for plain numbers their dtype as
    safetensors call it."""

    name: str
    block: int
    nbytes: int
    dtype: str | None = None

    def __str__(self) -> str:
        return self.name


#: code in the file -> type
TYPES = {
    0: Stored("F32", 1, 4, "F32"),
    1: Stored("F16", 1, 2, "F16"),
    2: Stored("Q4_0", 32, 18),
    3: Stored("Q4_1", 32, 20),
    6: Stored("Q5_0", 32, 22),
    7: Stored("Q5_1", 32, 24),
    8: Stored("Q8_0", 32, 34),
    9: Stored("Q8_1", 32, 40),
    10: Stored("Q2_K", 256, 84),
    11: Stored("Q3_K", 256, 110),
    12: Stored("Q4_K", 256, 144),
    13: Stored("Q5_K", 256, 176),
    14: Stored("Q6_K", 256, 210),
    15: Stored("Q8_K", 256, 292),
    16: Stored("IQ2_XXS", 256, 66),
    17: Stored("IQ2_XS", 256, 74),
    18: Stored("IQ3_XXS", 256, 98),
    19: Stored("IQ1_S", 256, 50),
    20: Stored("IQ4_NL", 32, 18),
    21: Stored("IQ3_S", 256, 110),
    22: Stored("IQ2_S", 256, 82),
    23: Stored("IQ4_XS", 256, 136),
    24: Stored("I8", 1, 1, "I8"),
    25: Stored("I16", 1, 2, "I16"),
    26: Stored("I32", 1, 4, "I32"),
    27: Stored("I64", 1, 8, "I64"),
    28: Stored("F64", 1, 8, "F64"),
    29: Stored("IQ1_M", 256, 56),
    30: Stored("BF16", 1, 2, "BF16"),
    34: Stored("TQ1_0", 256, 54),
    35: Stored("TQ2_0", 256, 66),
    39: Stored("MXFP4", 32, 17),
    40: Stored("NVFP4", 64, 36),
    41: Stored("Q1_0", 128, 18),
}
