"""The memory of a pass, simulated without tensors: when each storage is allocated and freed.

A `Storage` is a number of bytes. It is counted while a Python name, a saved tensor or a gradient refers to it, and
freed when CPython drops the last reference, like PyTorch's storages: the simulation is written like the modules it
models, so names go out of scope where theirs do. Bytes may be symbols; then the current total is a formula, and
there is no peak.
"""

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Bytes = Any  # an int, or a sympy expression of whole numbers


class Storage:
    """A number of bytes, and the part of the model that allocated them."""

    __slots__ = ("__weakref__", "bytes", "key", "log", "part")

    def __init__(self, log: "Log", size: Bytes, part: str):
        self.log, self.bytes, self.part = log, size, part
        self.key = log.add(self)

    def __del__(self) -> None:
        self.log.remove(self)


@dataclass
class Log:
    """Every allocation and release in order, and what is allocated now."""

    events: list[tuple[int, Bytes, str]] = field(default_factory=list)  # key, bytes (−1: freed), part
    allocated: dict[int, tuple[Bytes, str]] = field(default_factory=dict)
    keys: int = 0

    def add(self, storage: Storage) -> int:
        self.keys += 1
        self.events.append((self.keys, storage.bytes, storage.part))
        self.allocated[self.keys] = (storage.bytes, storage.part)
        return self.keys

    def remove(self, storage: Storage) -> None:
        self.events.append((storage.key, -1, storage.part))
        del self.allocated[storage.key]

    def by_part(self) -> dict[str, Bytes]:
        """Bytes allocated now, by the part that allocated them."""
        parts: dict[str, Bytes] = {}
        for size, part in self.allocated.values():
            parts[part] = parts.get(part, 0) + size
        return parts


class Peak(NamedTuple):
    """The largest number of bytes at once, and the part in which it occurs."""

    bytes: int
    part: str


def peak(events: list[tuple[int, Bytes, str]], rounded_to: int = 1) -> Peak:
    """The peak of these events, each storage rounded up as the allocator does."""
    current, highest, part_of_peak = 0, 0, ""
    sizes: dict[int, int] = {}
    for key, size, part in events:
        if size == -1:
            current -= sizes.pop(key)
            continue
        sizes[key] = -(-size // rounded_to) * rounded_to
        current += sizes[key]
        if current > highest:
            highest, part_of_peak = current, part
    return Peak(highest, part_of_peak)


class Value:
    """A simulated tensor: its storage, number of entries, bytes per entry, and the node that made it."""

    __slots__ = ("entries", "node", "storage", "width")

    def __init__(self, storage: Storage, entries: Bytes, width: int, node: "Node | None" = None):
        self.storage, self.entries, self.width, self.node = storage, entries, width, node

    @property
    def bytes(self) -> Bytes:
        return self.entries * self.width


class Weight(Value):
    """A parameter: it stays allocated, and stores its gradient."""

    __slots__ = ("grad",)

    def __init__(self, storage: Storage, entries: Bytes, width: int):
        super().__init__(storage, entries, width)
        self.node = Node([], (), lambda g: ())
        self.grad: Storage | None = None


Passed = (
    Storage | Callable[[], Storage] | None
)  # a callable allocates after the step has freed its saved tensors
Backward = Callable[[Storage], tuple[Passed, ...]]


class Node:
    """A step of the backward pass: what it saved, where its gradients go, and what it allocates."""

    __slots__ = ("apply", "order", "saved", "to")
    count = 0

    def __init__(self, saved: list[Any], to: tuple["Node | None", ...], apply: Backward):
        Node.count += 1
        self.order = Node.count
        self.saved, self.to, self.apply = saved, to, apply


class StopRecomputing(Exception):
    """All saved tensors have been recomputed."""


@dataclass
class Frame:
    """One checkpointed call: its saved tensors are dropped, and recomputed at their first use."""

    recompute: Callable[[], None]
    state: Storage | None  # of the random generator, to repeat the same samples
    count: int = 0
    computed: dict[int, Storage] | None = None


class Tape:
    """Simulates forward and backward passes. `grad`: whether anything is saved."""

    random_state = 0  # bytes that a checkpoint keeps of it on the device

    def __init__(self, grad: bool = True):
        self.log, self.grad = Log(), grad
        self._path: list[str] = []
        self._packing: Frame | None = None  # inside a checkpointed call
        self._filling: Frame | None = None  # computing one again
        self.casts: dict[int, Value] | None = None  # autocast's copies of weights, while it is on

    # -- storages -------------------------------------------------------------------------------------------------

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Storages that are allocated inside belong to this part."""
        self._path.append(name)
        try:
            yield
        finally:
            self._path.pop()

    def new(self, size: Bytes) -> Storage:
        return Storage(self.log, size, "/".join(self._path))

    def weight(self, entries: Bytes, width: int = 4) -> Weight:
        return Weight(self.new(entries * width), entries, width)

    def value(self, entries: Bytes, width: int) -> Value:
        """An input, without a gradient."""
        return Value(self.new(entries * width), entries, width)

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: tuple[Value, ...],
        entries: Bytes,
        width: int,
        saves: tuple[Storage, ...] = (),
        backward: Backward | None = None,
        within: Bytes = 0,
        saves_result: bool = False,
    ) -> Value:
        """The result of an operation on `inputs`. `within`: bytes that its kernel needs while it runs."""
        out = Value(self.new(entries * width), entries, width)
        inside = self.new(within) if within != 0 else None
        del inside
        if self.grad and backward is not None and any(x.node is not None for x in inputs):
            kept = (*saves, out.storage) if saves_result else saves
            out.node = Node([self._pack(s) for s in kept], tuple(x.node for x in inputs), backward)
        return out

    def view(self, x: Value) -> Value:
        """Another name for the same storage, with a step of its own in the backward pass."""
        node = Node([], (x.node,), lambda g: (g,)) if self.grad and x.node is not None else None
        return Value(x.storage, x.entries, x.width, node)

    # -- checkpointing --------------------------------------------------------------------------------------------

    def checkpoint(self, call: Callable[..., Value], *given: Value) -> Value:
        """`call(*given)` without saving its activations, as torch.utils.checkpoint with use_reentrant=False."""
        if not self.grad:
            return call(*given)
        path = list(self._path)

        def recompute() -> None:
            before, self._path, casts = self._path, list(path), self.casts
            if casts is not None or cast:
                self.casts = {}  # the recomputation has an autocast region of its own
            try:
                call(*given)
            finally:
                self._path, self.casts = before, casts

        cast = self.casts is not None
        frame = Frame(recompute, self.new(self.random_state) if self.random_state else None)
        outer, self._packing = self._packing, frame
        try:
            return call(*given)
        finally:
            self._packing = outer

    def _pack(self, storage: Storage) -> Any:
        if self._filling is not None:
            frame = self._filling
            assert frame.computed is not None
            frame.computed[len(frame.computed)] = storage
            if len(frame.computed) == frame.count:
                raise StopRecomputing
            return storage
        if self._packing is not None:
            self._packing.count += 1
            return (self._packing, self._packing.count - 1)
        return storage

    def _unpack(self, saved: Any) -> Storage:
        if isinstance(saved, Storage):
            return saved
        frame, index = saved
        if frame.computed is None:
            frame.computed = {}
            self._filling = frame
            try:
                frame.recompute()
            except StopRecomputing:
                pass
            finally:
                self._filling = None
        storage = frame.computed[index]
        frame.computed[index] = None  # handed out once
        return storage

    # -- the backward pass ----------------------------------------------------------------------------------------

    def backward(self, loss: Value, weights: dict[Node, Weight]) -> None:
        """From the loss to the weights, the newest ready step first; a step frees what it saved when it is done."""
        assert loss.node is not None
        pending = _pending_gradients(loss.node)
        arrived: dict[Node, Storage] = {loss.node: self.new(loss.bytes)}
        ready: list[tuple[float, int, Node]] = [(-loss.node.order, 0, loss.node)]
        loss.node = None
        while ready:
            _, _, node = heapq.heappop(ready)
            grad = arrived.pop(node)
            if node in weights:
                _accumulate(weights[node], grad)
                continue
            saved = [self._unpack(s) for s in node.saved]
            made = node.apply(grad)
            del saved
            passed = tuple(g() if callable(g) else g for g in made)
            del grad, made
            node.saved = []
            for to, g in zip(node.to, passed):
                if to is None:
                    continue
                if g is not None and to not in arrived:
                    arrived[to] = g  # a second one is added in place
                pending[to] -= 1
                if pending[to] == 0:
                    first = float("-inf") if to in weights else -to.order
                    heapq.heappush(ready, (first, to.order, to))
                del g
            del passed, to, node


def _accumulate(weight: Weight, grad: Storage) -> None:
    if weight.grad is None:
        weight.grad = grad


def _pending_gradients(root: Node) -> dict[Node, int]:
    """The number of gradients that each step needs."""
    pending: dict[Node, int] = {}
    seen, stack = {root}, [root]
    while stack:
        for to in stack.pop().to:
            if to is not None:
                pending[to] = pending.get(to, 0) + 1
                if to not in seen:
                    seen.add(to)
                    stack.append(to)
    return pending
