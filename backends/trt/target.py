"""NVIDIA's two libraries that build these networks, and the GPUs that each builds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from g4ir.errors import InputError


@dataclass(frozen=True)
class Library:
    """A Python package of TensorRT. One that builds ahead of time needs no GPU: kernels are
    finished when an engine is loaded; the other times them on the GPU that it builds for."""

    name: str
    module: str
    #: from, and up to but not including
    supported: tuple[tuple[int, ...], tuple[int, ...]]
    #: what pip installs
    requirement: str
    #: versions whose signatures every call is compared with
    compared: tuple[str, ...]
    ahead_of_time: bool = False

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install '{self.requirement}'"


TENSORRT = Library(
    "TensorRT", "tensorrt", ((10, 15), (12,)), "tensorrt>=10.15,<12", ("10.16.1", "11.4.0")
)
RTX = Library(
    "TensorRT-RTX", "tensorrt_rtx_bindings", ((1, 5), (2,)), "g4ir[rtx]", ("1.7.1",), True
)
LIBRARIES: Mapping[str, Library] = {lib.name: lib for lib in (TENSORRT, RTX)}

#: of IR dtypes, what needs a newer GPU than Turing
NOT_ON_TURING = ("bf16",)
#: behind a capability: this one and all later ones
LATER = "+"


@dataclass(frozen=True)
class Target:
    """The GPUs of a build: `--target NAME`."""

    name: str
    library: Library
    #: compute capabilities whose GPUs run the engine
    capabilities: tuple[str, ...]
    #: part of the GPU's name, where the capability leaves it open
    gpu: str = ""
    #: dtypes that its GPUs do not compute in
    lacks: tuple[str, ...] = ()


def _single(capability: str, *lacks: str) -> Target:
    return Target(f"sm{capability.replace('.', '')}", RTX, (capability,), lacks=lacks)


#: of the GPU at hand, where none is named
HOPPER = Target("", TENSORRT, ("9.0",))
TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target("h100", TENSORRT, ("9.0",), "H100"),
        Target("h200", TENSORRT, ("9.0",), "H200"),
        Target("rtx", RTX, ("8.0", "8.6", "8.9", "12.0" + LATER)),
        _single("7.5", *NOT_ON_TURING),
        *map(_single, ("8.0", "8.6", "8.9", "12.0", "12.1")),
    )
}

#: targets that are built on any machine
ANYWHERE = tuple(name for name, t in TARGETS.items() if t.library.ahead_of_time)


def find_target(name: str) -> Target:
    """Return a target by name; InputError lists them, and says which library has a Hopper GPU."""
    if name in TARGETS:
        return TARGETS[name]
    if name in ("sm90", "sm100"):
        raise InputError(
            f"--target {name}: {RTX.name} does not build for data-centre GPUs of this compute "
            f"capability; {TENSORRT.name} does, for the H100 or H200 that it runs on: --target "
            f"h100 or h200 there (`{TENSORRT.install}`)"
        )
    raise InputError(f"--target {name}: one of {', '.join(TARGETS)}")


def runs_on(capabilities: tuple[str, ...], found: tuple[int, int]) -> bool:
    """Whether a GPU of compute capability `found` runs engines for these."""
    return any(
        found >= numbers(c) if c.endswith(LATER) else found == numbers(c) for c in capabilities
    )


def numbers(capability: str) -> tuple[int, int]:
    """Return `8.6` as (8, 6)."""
    major, minor = capability.removesuffix(LATER).split(".")
    return int(major), int(minor)


def target_of(library: str, capabilities: Sequence[str]) -> Target:
    """Return the target of an engine that this library built for these capabilities."""
    return Target("", LIBRARIES[library], tuple(capabilities))
