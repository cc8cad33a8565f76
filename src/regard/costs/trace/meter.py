"""When each storage is allocated and freed, in which phase of a step, and by which module."""

import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from ...compat import storage_id


class Record(NamedTuple):
    """A storage: its bytes, the phase and the module that allocated it, and the operation."""

    bytes: int
    phase: str  # setup, forward, backward, optimizer
    path: str
    operation: str
    workspace: bool = False  # freed before the operation returns


class Meter:
    """Events in order: (key, +1) where the storage `records[key]` is allocated, (key, −1) where it is freed."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.events: list[tuple[int, int]] = []
        self.alive: dict[int, int] = {}  # id of a storage → key
        self.needs: dict[int, Any] = {}  # key → attention.Need
        self.phase = "setup"
        self._references: dict[int, weakref.ref] = {}

    def track(self, x: Tensor, path: str = "", operation: str = "") -> None:
        """Note the storage of x, if it is new."""
        storage, at = x.untyped_storage(), storage_id(x)
        if at in self.alive:
            return
        key = self._new(Record(storage.nbytes(), self.phase, path, operation))
        self.alive[at] = key
        self._references[at] = weakref.ref(storage, lambda _, at=at: self._freed(at))

    def same(self, x: Tensor, as_: Tensor) -> None:
        """The storage of x is not a new one: it represents that of another tensor, which is already noted."""
        at = storage_id(x)
        self.alive[at] = self.alive[storage_id(as_)]
        self._references[at] = weakref.ref(x.untyped_storage(), lambda _: self.alive.pop(at))

    def workspace(self, size: int, path: str, operation: str, need: Any = None) -> None:
        """Bytes that an operation allocates and frees while it runs; need: their formula, if not a line."""
        if size > 0 or need is not None:
            key = self._new(Record(size, self.phase, path, operation, workspace=True))
            self.events.append((key, -1))
            if need is not None:
                self.needs[key] = need

    def _new(self, record: Record) -> int:
        self.records.append(record)
        key = len(self.records) - 1
        self.events.append((key, 1))
        return key

    def _freed(self, at: int) -> None:
        self._references.pop(at, None)
        self.events.append((self.alive.pop(at), -1))

    def key_of(self, x: Tensor) -> int | None:
        return self.alive.get(storage_id(x))

    def during(self, phase: str) -> AbstractContextManager:
        return patch.object(self, "phase", phase)

    def stop(self) -> None:
        """Later releases are not noted: what is alive now stays so to the end."""
        self._references.clear()
