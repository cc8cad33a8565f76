"""The memory of a pass, played through without tensors: which storage is made when, and when its last holder goes.

A `Storage` is a number of bytes. It is counted while a Python name, a saved tensor or a gradient holds it, and
given back when CPython drops the last of them, as PyTorch's own storages are: the play is written like the
modules it stands for, so names go out of scope where theirs do. Bytes may be symbols; then what is held is a
formula, and there is no peak.
"""

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Bytes = Any  # an int, or a sympy expression of whole numbers


class Storage:
    """Bytes that somebody holds, and the part of the model that made them."""

    __slots__ = ("__weakref__", "bytes", "key", "log", "part")

    def __init__(self, log: "Log", size: Bytes, part: str):
        self.log, self.bytes, self.part = log, size, part
        self.key = log.made(self)

    def __del__(self) -> None:
        self.log.gone(self)


@dataclass
class Log:
    """Every making and giving back, in order; what is held now, and the most that was."""

    events: list[tuple[int, Bytes, str]] = field(default_factory=list)  # key, bytes (−1: given back), part
    held: dict[int, tuple[Bytes, str]] = field(default_factory=dict)
    keys: int = 0

    def made(self, storage: Storage) -> int:
        self.keys += 1
        self.events.append((self.keys, storage.bytes, storage.part))
        self.held[self.keys] = (storage.bytes, storage.part)
        return self.keys

    def gone(self, storage: Storage) -> None:
        self.events.append((storage.key, -1, storage.part))
        del self.held[storage.key]

    def by_part(self) -> dict[str, Bytes]:
        """What is held now, by the part that made it."""
        parts: dict[str, Bytes] = {}
        for size, part in self.held.values():
            parts[part] = parts.get(part, 0) + size
        return parts


class Peak(NamedTuple):
    """The most bytes held at once, and the part that was being made then."""

    bytes: int
    part: str


def peak(events: list[tuple[int, Bytes, str]], rounded_to: int = 1) -> Peak:
    """Of the events in order, each storage rounded up as its allocator does."""
    held, most, where = 0, 0, ""
    sizes: dict[int, int] = {}
    for key, size, part in events:
        if size == -1:
            held -= sizes.pop(key)
            continue
        sizes[key] = -(-size // rounded_to) * rounded_to
        held += sizes[key]
        if held > most:
            most, where = held, part
    return Peak(most, where)


class Value:
    """A tensor of the play: its storage, how many entries, how wide one is, and the node that made it."""

    __slots__ = ("entries", "node", "storage", "width")

    def __init__(self, storage: Storage, entries: Bytes, width: int, node: "Node | None" = None):
        self.storage, self.entries, self.width, self.node = storage, entries, width, node

    @property
    def bytes(self) -> Bytes:
        return self.entries * self.width


class Weight(Value):
    """A parameter: it is held all the time, and keeps its gradient."""

    __slots__ = ("grad",)

    def __init__(self, storage: Storage, entries: Bytes, width: int):
        super().__init__(storage, entries, width)
        self.node = Node([], (), lambda g: ())
        self.grad: Storage | None = None


Passed = (
    Storage | Callable[[], Storage] | None
)  # what is called is made after the step, which has unpacked by then
Backward = Callable[[Storage], tuple[Passed, ...]]


class Node:
    """A step of the backward pass: what it saved, whom it passes gradients to, and what it makes on the way."""

    __slots__ = ("apply", "order", "saved", "to")
    made = 0

    def __init__(self, saved: list[Any], to: tuple["Node | None", ...], apply: Backward):
        Node.made += 1
        self.order = Node.made
        self.saved, self.to, self.apply = saved, to, apply


class StopRecomputing(Exception):
    """All that was saved has been computed again."""


@dataclass
class Frame:
    """One checkpointed call: what it saved is thrown away, and computed again when first asked for."""

    again: Callable[[], None]
    state: Storage | None  # of the random numbers, to draw the same again
    count: int = 0
    computed: dict[int, Storage] | None = None


class Tape:
    """Plays forward and backward passes. `grad` says whether anything is saved."""

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
        """What is made inside belongs to this part."""
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
        """Something given from outside, without a gradient."""
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
        """`call(*given)` whose insides are not kept, as torch.utils.checkpoint with use_reentrant=False."""
        if not self.grad:
            return call(*given)
        path = list(self._path)

        def again() -> None:
            before, self._path, casts = self._path, list(path), self.casts
            if casts is not None or cast:
                self.casts = {}  # the recomputation has an autocast region of its own
            try:
                call(*given)
            finally:
                self._path, self.casts = before, casts

        cast = self.casts is not None
        frame = Frame(again, self.new(self.random_state) if self.random_state else None)
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
                frame.again()
            except StopRecomputing:
                pass
            finally:
                self._filling = None
        storage = frame.computed[index]
        frame.computed[index] = None  # given out once
        return storage

    # -- the backward pass ----------------------------------------------------------------------------------------

    def backward(self, loss: Value, weights: dict[Node, Weight]) -> None:
        """From the loss to the weights, the newest ready step first; what a step saved goes when it is done."""
        assert loss.node is not None
        waits = _waits(loss.node)
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
                waits[to] -= 1
                if waits[to] == 0:
                    first = float("-inf") if to in weights else -to.order
                    heapq.heappush(ready, (first, to.order, to))
                del g
            del passed, to, node


def _accumulate(weight: Weight, grad: Storage) -> None:
    if weight.grad is None:
        weight.grad = grad


def _waits(root: Node) -> dict[Node, int]:
    """How many gradients each step waits for."""
    waits: dict[Node, int] = {}
    seen, stack = {root}, [root]
    while stack:
        for to in stack.pop().to:
            if to is not None:
                waits[to] = waits.get(to, 0) + 1
                if to not in seen:
                    seen.add(to)
                    stack.append(to)
    return waits
