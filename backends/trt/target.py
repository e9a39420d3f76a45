"""NVIDIA's two libraries that build these networks, and the GPUs that each builds for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from g4ir.errors import InputError


@dataclass(frozen=True)
class Library:
    """A Python package that builds and runs engines. TensorRT-RTX builds ahead of time without a
    GPU and compiles kernels when it loads an engine; TensorRT times kernels on the target GPU."""

    name: str
    module: str
    #: minimum version, and maximum (exclusive)
    supported: tuple[tuple[int, ...], tuple[int, ...]]
    #: pip requirements
    requirements: tuple[str, ...]
    ahead_of_time: bool = False

    @property
    def install(self) -> str:
        """The pip command that installs it."""
        return " ".join(("pip install", *map(repr, self.requirements)))


TENSORRT = Library(
    name="TensorRT", module="tensorrt", supported=((11,), (12,)), requirements=("tensorrt>=11,<12",)
)
RTX = Library(
    name="TensorRT-RTX",
    module="tensorrt_rtx_bindings",
    supported=((1, 7), (2,)),
    requirements=("tensorrt-rtx-cu12-libs>=1.7,<2", "tensorrt-rtx-cu12-bindings>=1.7,<2"),
    ahead_of_time=True,
)
LIBRARIES: Mapping[str, Library] = {lib.name: lib for lib in (TENSORRT, RTX)}

#: suffix of a capability: this and all later ones
LATER = "+"


@dataclass(frozen=True)
class Target:
    """Target of a build (`--target NAME`): the library, and the GPUs that run the engine."""

    name: str
    library: Library
    #: compute capabilities whose GPUs run the engine
    capabilities: tuple[str, ...]
    #: part of the GPU's name, if only one of several GPUs of the capability is meant; empty: any
    gpu: str = ""

    @property
    def ahead_of_time(self) -> bool:
        return self.library.ahead_of_time

    @property
    def gpus(self) -> str:
        """The compute capabilities as text."""
        *some, last = (c.replace(LATER, " or later") for c in self.capabilities)
        return f"compute capability {', '.join([*some, last])}"

    @property
    def has_fp4(self) -> bool:
        """Whether the target's library has matmuls of FP4 (e2m1) on all of the target's GPUs."""
        return self.ahead_of_time and all(version_tuple(c) >= (12, 0) for c in self.capabilities)

    def runs_on(self, capability: tuple[int, ...]) -> bool:
        """Whether a GPU of this compute capability runs its engines."""
        return any(
            capability >= version_tuple(c) if c.endswith(LATER) else capability == version_tuple(c)
            for c in self.capabilities
        )


def _single(capability: str) -> Target:
    return Target(f"sm{capability.replace('.', '')}", RTX, (capability,))


#: default target
HOPPER = Target("", TENSORRT, ("9.0",))
TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target("h100", TENSORRT, ("9.0",), "H100"),
        Target("h200", TENSORRT, ("9.0",), "H200"),
        Target("rtx", RTX, ("8.0", "8.6", "8.9", "12.0" + LATER)),
        *map(_single, ("8.0", "8.6", "8.9", "12.0", "12.1")),
    )
}
#: targets that can be built on any machine
ANYWHERE = tuple(name for name, t in TARGETS.items() if t.ahead_of_time)


def find_target(name: str) -> Target:
    """Return a target by name. InputError lists the names; for `sm90`, which TensorRT-RTX does
    not build for, it names TensorRT's targets."""
    if name in TARGETS:
        return TARGETS[name]
    if name == "sm90":
        raise InputError(
            f"--target {name}: {RTX.name} does not build for H100 and H200; {TENSORRT.name} does, "
            f"on the GPU itself: install it there (`{TENSORRT.install}`) and give --target h100 or "
            f"h200"
        )
    raise InputError(f"--target {name[:40]}: expected one of {', '.join(TARGETS)}")


def version_tuple(capability: str) -> tuple[int, ...]:
    """Return (8, 6) for `8.6`, (12, 0) for `12.0+`."""
    return tuple(map(int, capability.removesuffix(LATER).split(".")))
