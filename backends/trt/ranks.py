"""Several ranks: by what their contexts exchange, and what all of them do or none does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4ir.errors import EngineError
from g4ir.parallel.group import Group

if TYPE_CHECKING:
    from ..torch_compile.cuda_graph import Record

#: the type that a capsule's address has; a capsule points to the name as long as it lives
HANDLE = b"ncclComm_t"


def capsule(address: int) -> Any:
    """Return an address in the form that TensorRT's binding takes one in."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, HANDLE, None)


def communicator_of(group: Group) -> Any:
    """Return the NCCL communicator of all ranks, for execution contexts; all ask at a time."""
    return capsule(group.communicator())


def recorded_by_all(record: Record, agree: Callable[[bool], list[Any]]) -> Record:
    """Return what records a step where every rank can. One that ran it launch by launch would make
    no context where the others make theirs, and wait for it. `agree` gathers what ranks say."""

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        said = EngineError("another rank could not record the step")
        made = None
        try:
            made = record(work)
        except EngineError as e:
            said = e
        if not all(agree(made is not None)) or made is None:
            raise said
        return made

    return recorded
