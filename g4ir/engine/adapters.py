"""Adapters by name, loaded and removed while an engine runs.

    adapters.load("fr", "path/of/adapter")
    engine.generate(tokens, adapter="fr")
    adapters.unload("fr")            # requests that use it finish

New requests no longer get an adapter that was removed or replaced; its slot is free once all
requests that use it have ended and all sessions that use it are deleted. Thread-safe.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.reader import did_you_mean
from g4ir.weights.adapter import Adapter
from g4ir.weights.checkpoint import sha256
from g4ir.weights.lora import Slots


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in a slot; `digest`: of its weights, config and scale, for the prefix cache."""

    name: str
    path: str
    slot: int
    digest: str


class Adapters:
    """LoRA adapters of an engine by name, in a fixed number of slots."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._loaded: dict[str, LoadedAdapter] = {}
        #: number of users of each slot: a loaded name, requests and sessions that have not ended
        self._users: Counter[int] = Counter()
        self._lock = threading.RLock()

    @property
    def loaded(self) -> dict[str, LoadedAdapter]:
        """Return the adapters by name."""
        with self._lock:
            return dict(self._loaded)

    def load(self, name: str, path: str | Path, replace: bool = False) -> LoadedAdapter:
        """Load an adapter (`path`: DIR or DIR=SCALE) under a name. InputError if the name is
        invalid, or taken without `replace`, or no slot is free; InputError or WeightsError for an
        adapter that does not fit the model. After an error nothing has changed."""
        if not name or not name.isprintable() or set(name) & set(":=/ "):
            why = "expected a name of printable characters, without : = / and spaces"
            raise InputError(f"adapter {name[:40]!r}: {why}")
        adapter = Adapter.of(path)
        digest = f"{sha256(adapter.weights)} {adapter.config} {adapter.factor}"
        with self._lock:
            if name in self._loaded and not replace:
                why = f"is loaded already, from {self._loaded[name].path}"
                raise InputError(f"adapter {name!r} {why}; unload it first")
            replaced = self._loaded.get(name)
            slot = next((i for i in range(self.slots.count) if not self._users[i]), None)
            if slot is None and replaced and self._users[replaced.slot] == 1:
                slot = replaced.slot  # no request or session uses it
            if slot is None:
                names = ", ".join(sorted(self._loaded)) or "none, but removed ones are in use"
                fix = "unload one, let its requests end, or load the engine with more adapter_slots"
                count = self.slots.count
                raise InputError(
                    f"adapter {name!r}: none of the {count} slots is free (loaded: {names}); {fix}"
                )
            self.slots.fill(slot, adapter)
            if replaced:
                self.unload(name)
            self._users[slot] += 1
            self._loaded[name] = LoadedAdapter(name, str(path), slot, digest)
            return self._loaded[name]

    def unload(self, name: str) -> None:
        """Remove a name; InputError if there is none."""
        with self._lock:
            loaded = self._find(name)
            del self._loaded[name]
            self._users[loaded.slot] -= 1

    def use(self, name: str, user: Any) -> tuple[LoadedAdapter, weakref.finalize[[int], Any]]:
        """Return an adapter, and a function that ends its use, which is called at the latest when
        `user` is garbage-collected. InputError for an unknown name."""
        with self._lock:
            loaded = self._find(name)
            self._users[loaded.slot] += 1
        return loaded, weakref.finalize(user, self._release, loaded.slot)

    def check(self, name: str) -> None:
        """Raise InputError for an unknown name."""
        with self._lock:
            self._find(name)

    def _find(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            names = ", ".join(sorted(self._loaded)) or "none"
            near = did_you_mean(name, self._loaded)
            raise InputError(f"adapter {name[:40]!r}: not loaded{near}; loaded: {names}")
        return self._loaded[name]

    def _release(self, slot: int) -> None:
        with self._lock:
            self._users[slot] -= 1
