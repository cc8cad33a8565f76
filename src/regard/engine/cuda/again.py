"""A plain call made before: tensors that lie as those did go straight to the launches.

On a short call the GPU waits for Python. Without bias, dropout, lengths and log-sum-exp there is nothing left to
decide but how the tensors lie, and that is one look into a table, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .host import Task, backward, forward, rows
from .launches import backward_call, forward_call
from .prepared import layout
from .triton.bias_and_dropout import NOTHING

MOST = 16  # ways to lie that are remembered
SPARE = 1 << 18  # numbers of a tensor kept so that it need not be made anew: 1 MiB

# Looked up once: on the way to a launch every name behind a dot counts. PyTorch without CUDA has neither.
_device = getattr(torch._C, "_cuda_getDevice", None)
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_learning = torch.is_grad_enabled


class Lie:
    """One way for q, k and v to lie: what runs forward, and backward by how the gradient lies."""

    __slots__ = ("backwards", "forward")

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward
        self.backwards: dict[tuple[int, ...], Callable[..., Any]] = {}


class Again:
    """(q, k, v) → o of one task and one shape of each; differentiable if `learns`."""

    def __init__(self, task: Task, learns: bool):
        self.task, self.learns = task, learns
        self.known: dict[tuple[tuple[int, ...], ...], Lie] = {}
        # What takes the lse of calls without gradient; nobody reads it. Only on the stream it was made on, and not in
        # a graph: there a kernel might still write when the memory has been given to others.
        self.spare: Tensor | None = None
        self.stream = -1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _apply(q, k, v, self) if self.learns else self.forward(q, k, v)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Lie | None]:
        """o, lse, and what the backward pass goes on with."""
        how = q.stride(), k.stride(), v.stride()
        lie = self.known.get(how)
        if lie is not None and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 and _here(q):
            spare = self.spare
            if spare is not None and (self.stream != _stream(q) or _in_graph(q)):
                spare = None
            o, lse = lie.forward(q, k, v, None, NOTHING, spare)
            return o, lse, lie
        lie = None
        if _ready(q, k, v):
            call = forward_call(self.task, layout(q), layout(k), layout(v), q.dtype, q.device, False)
            lie = _kept(self.known, how, Lie(call))
        o, lse = forward(q, k, v, self.task)
        if not self.learns and lse.numel() <= SPARE and not _in_graph(q):
            self.spare, self.stream = lse, _stream(q)
        return o, lse, lie

    def backward(
        self, lie: Lie | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of q, k and v. Those lie as they did forward, and o as it was made then."""
        call = None if lie is None else lie.backwards.get(do.stride())
        if call is not None and not do.data_ptr() & 15 and _here(do):
            return call(q, k, v, o, do, lse, None, None, NOTHING)[:4]
        if lie is not None and _ready(q, k, v, o, do):
            given = layout(q), layout(k), layout(v), layout(o), layout(do)
            call = backward_call(self.task, given, q.dtype, q.device, False, False, False)
            _kept(lie.backwards, do.stride(), call)
        return *backward(q, k, v, o, lse, do, None, self.task)[:3], None


def _kept(table: dict[Any, Any], how: Any, what: Any) -> Any:
    if len(table) >= MOST:
        table.clear()
    table[how] = what
    return what


def _stream(x: Tensor) -> int:
    return _stream_of(x.get_device()) if x.is_cuda else 0


def _in_graph(x: Tensor) -> bool:
    """Whether what is launched now will be replayed later."""
    return x.is_cuda and _capturing()


def _here(x: Tensor) -> bool:
    """Whether x is on the current device."""
    at = x.get_device()
    return at < 0 or at == _device()


def _ready(*tensors: Tensor) -> bool:
    """Whether the kernels can read all of them as they lie: on the current device, from a multiple of 16 bytes on."""
    wide = tensors[0].shape[-1]
    fit = all(x.shape[-1] == wide and not x.data_ptr() & 15 and rows(x) is x for x in tensors)
    return fit and _here(tensors[0])


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, again):
        o, lse, ctx.lie = again.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.again = again
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, o, lse = ctx.saved_tensors
        if _learning():  # create_graph=True: these gradients will be differentiated again
            from .. import double_backward

            task = ctx.again.task
            place = task.pattern, task.start, task.step, task.scale
            return *double_backward.gradients(
                (grad, None), (q, k, v), double_backward.Weighting(*place)
            ), None
        return ctx.again.backward(ctx.lie, q, k, v, o, lse, grad)


# What `_Attend.apply` and the node of its backward pass come to, when they have looked whether functorch is at work
# (then no call is remembered) and which of two names the backward pass has: 5 µs of the 50 that a Function takes.
_apply = super(torch.autograd.Function, _Attend).apply
_Attend._backward_cls.apply = _Attend.backward  # type: ignore[attr-defined]
