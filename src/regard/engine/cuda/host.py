"""From tensors to launches: forward, backward, and repeated calls with the same shapes and strides."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ... import compat
from ..call import Cache, Call, Extras
from ..reference_backend import gradients
from . import launches
from .call import PLAIN, CallLayout, Task, kinds_of_rows, layout, on_device, padded
from .documents import Packed
from .prepared import PREPARED, current_device, raw_stream

# Prepared calls: for one layout of the tensors, what is allocated and launched.


def _launches_of(task: Task) -> Cache:
    return task.pattern.kept if isinstance(task.pattern, Packed) else PREPARED


def _once_per_layout(make: Callable[[CallLayout], Any]) -> Callable[[CallLayout], Any]:
    def find(call: CallLayout) -> Any:
        cache, key = _launches_of(call.task), (make, *call)
        if cache is not PREPARED:  # it belongs to ids: no key refers to their pattern, which refers to it
            key = make, *tuple(vars(call.task).values())[1:], *call[1:]
        found = cache.get(key)
        return cache.put(key, make(call)) if found is None else found

    return find


@_once_per_layout
def prepared_forward(call: CallLayout) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, extras, spare_lse) → (o, lse)."""
    passes, program = launches.forward(call)
    b, h, _, n, _, _, d_v = call.sizes
    shape, dtype, device = (b, h, n, d_v), call.dtype, call.device
    like, run, plain = torch.empty_like, program.run, not call.optional_inputs
    covers, strides, o_is_like_q = passes.covers, call.output.stride, call.tensors[0] == call.output
    rows = torch.empty(shape[:3], device=device)
    rows.untyped_storage().resize_(0)  # a shape without memory: 6 µs by `empty_like`, 9 by `empty`
    # A kernel that continues from an earlier pass reads lse, so the spare tensor cannot be used.
    accumulates, joined = passes.joins, not call.has_sink or launches.joins_sink(call, passes)

    def forward(q, k, v, extras, spare_lse=None):
        if covers:
            o = like(q) if o_is_like_q else torch.empty_strided(shape, strides, dtype=dtype, device=device)
            lse = like(rows) if spare_lse is None or accumulates else spare_lse
        else:
            o = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
            lse = torch.full(shape[:3], -torch.inf, device=device)
        given = () if plain else _present(*extras[:3], extras.at, extras.sink)
        run((q, k, v, o, lse, *given), extras.seed)
        return (o, lse) if joined else join_sink(o, lse, extras.sink)

    return forward


@_once_per_layout
def prepared_backward(call: CallLayout) -> Callable[..., tuple[Tensor | None, ...]]:
    """((q, k, v, o, do, lse), dlse, extras) → dq, dk, dv; also of table and slopes if the bias is learned; and if the
    sink is learned, delta (Σ do ∘ o − dlse), if the kernels give it."""
    outputs, program = launches.backward(call)
    run, learned = program.run, call if call.bias_gradient else None
    if not call.bias_gradient and not call.optional_inputs:

        def backward(tensors, dlse, extras):
            grads = outputs(tensors)
            run((*tensors, *grads), extras.seed)
            return grads

    else:

        def backward(tensors, dlse, extras):
            out = outputs(tensors)
            run((*tensors, *_present(dlse, *extras[:3], extras.sink), *out), extras.seed)
            return out if learned is None else (*out[:3], *launches.bias_gradients(learned, out[3:]))

    return backward


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """From lse with the sink in it, and delta = Σ do ∘ o − dlse."""
    weights = (sink.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, -torch.inf).exp_()
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


def join_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """As merge_sink, in place."""
    logits = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logits).masked_fill_(lse == -torch.inf, 0.0)  # −∞ − (−∞) would be NaN
    return o.mul_(share[..., None]), torch.logaddexp(lse, logits)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


# One call


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    task: Task,
    extras: Extras = PLAIN,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and ln Σ exp(scores); zeros and −∞ for a query that has no allowed key.

    Keys at and past lengths[b] are hidden, whatever they contain; with two lengths also those before the first.
    Dropout applies to the weights after the softmax. A sink is joined.
    """
    if not q.numel() or not k.numel():
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        o = q.new_zeros((*q.shape[:3], v.shape[-1]))
        return (o, lse) if extras.sink is None else join_sink(o, lse, extras.sink)
    d_v = v.shape[-1]
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v, _min_value_width(q))
    layouts, extras = (layout(q), layout(k), layout(v)), on_device(extras, q.device)
    call = CallLayout(task, layouts, q.dtype, q.device, *kinds_of_rows(extras))
    with _device_of(q):
        o, lse = prepared_forward(call)(q, k, v, extras)
    return _narrowed(o, d_v), lse


def backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    task: Task,
    extras: Extras = PLAIN,
    bias_gradient: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and, if `bias_gradient`, of table and slopes; and for the gradient of a sink
    delta = Σ do ∘ o − dlse, which is None if the kernels do not give it.

    saved: q, k, v, o, lse. grads: of o, and of lse or None.
    """
    (q, k, v, o, lse), (do, dlse) = saved, grads
    if not q.numel() or not k.numel():
        return *(None if x is None else torch.zeros_like(x) for x in (q, k, v, *extras[:2])), None
    d_k, d_v, least = q.shape[-1], v.shape[-1], _min_value_width(q)
    q, k = aligned_rows(q), aligned_rows(k)
    v, o, do = (aligned_rows(x, least) for x in (v, o, do))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    layouts = tuple(map(layout, (q, k, v, o, do)))
    given = on_device(extras, q.device)
    kinds = *kinds_of_rows(given), dlse is not None, bias_gradient
    run = prepared_backward(CallLayout(task, layouts, q.dtype, q.device, *kinds))
    with _device_of(q):
        made = run((q, k, v, o, do, lse), dlse, given)
    dq, dk, dv = (_narrowed(x, d) for x, d in zip(made[:3], (d_k, d_k, d_v)))
    if not bias_gradient:
        return dq, dk, dv, None, None, made[3] if len(made) > 3 else None
    return dq, dk, dv, *map(_like_parameter, made[3:], extras[:2]), None


def _narrowed(x: Tensor, d: int) -> Tensor:
    return x if x.shape[-1] == d else x[..., :d].contiguous()


def _like_parameter(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)


def aligned_rows(x: Tensor, min_width: int = 1) -> Tensor:
    """x, or a copy of it, with contiguous rows that begin and end at multiples of 16 bytes."""
    whole = 16 // x.element_size()
    if short := max(-x.shape[-1] % whole, min_width - x.shape[-1]):
        return F.pad(x, (0, short))
    a, b, c, last = x.stride()
    aligned = min(a, b, c) >= 0 and not (a % whole or b % whole or c % whole or x.storage_offset() % whole)
    return x if last == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def _min_value_width(q: Tensor) -> int:
    """The smallest width of the values for queries of this width.

    Triton 3.6 reads past shared memory in the product of 128 rows of weights with values 16 wide, where keys are
    wider (found by compute-sanitizer on an H200).
    """
    return 24 if padded(q.shape[-1]) > 16 else 1


def _device_of(q: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of q the current one, if it is not."""
    return nullcontext() if _on_current_device(q) else torch.cuda.device(q.device)


# Repeated calls without bias, dropout and log-sum-exp. In a short call the GPU waits for Python; here everything but
# the strides is decided in advance, and the strides are one lookup, forward and backward.

MAX_SPARE = 1 << 18  # numbers of an lse that is reused between calls: 1 MiB

_UNKNOWN = None, None
_grad_enabled, _is_capturing = torch.is_grad_enabled, compat.stream_is_capturing


class PreparedAttention:
    """(q, k, v) → o for one task and one shape of each tensor; differentiable if `learns`. Also
    (q, k, v, lengths, at, sink) → o: integers per batch row (`at` without gradients), and a number per head.
    """

    def __init__(self, task: Task, learns: bool):
        self.task, self.learns, self.token = task, learns, object()
        self.launches = _launches_of(task)
        self.find = self.launches.get
        # Receives the lse of calls without gradients, which is never read. It is used only on the stream it was
        # created on, and not in a CUDA graph: a kernel could still write to it after its memory was reused.
        self.spare: Tensor | None = None
        self.stream = -1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None) -> Tensor:
        lengths, at, sink = rows or (None, None, None)
        if self.learns:
            return _apply(q, k, v, sink, lengths, self)
        return self.forward(q, k, v, Extras(lengths=lengths, at=at, sink=sink) if rows else PLAIN)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras = PLAIN) -> tuple[Tensor, Tensor, Any]:
        """o, lse, and the key under which the backward pass finds its launches."""
        key: tuple[Any, ...] = self.token, q.stride(), k.stride(), v.stride()
        if extras is not PLAIN:
            extras = on_device(extras, q.device)
            key = *key, *kinds_of_rows(extras)
        run, token = self.find(key, _UNKNOWN)
        aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        if run is not None and aligned and _on_current_device(q):
            spare = self.spare
            if spare is not None and (self.stream != _stream(q) or _in_graph(q)):
                spare = None
            o, lse = run(q, k, v, extras, spare)
            return o, lse, token
        token = None
        if _readable(q, k, v):
            layouts = layout(q), layout(k), layout(v)
            call = CallLayout(self.task, layouts, q.dtype, q.device, *kinds_of_rows(extras))
            _, token = self.launches.put(key, (prepared_forward(call), object()))
        o, lse = forward(q, k, v, self.task, extras)
        if not self.learns and lse.numel() <= MAX_SPARE and not _in_graph(q):
            self.spare, self.stream = lse, _stream(q)
        return o, lse, token

    def backward(
        self, token: Any, saved: tuple[Tensor, ...], do: Tensor, extras: Extras = PLAIN
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k and v; and for that of a sink delta, if the kernels give it. saved: q, k, v, o, lse,
        with the strides they had forward."""
        (q, k, v, o, lse), key = saved, (token, do.stride(), extras.sink is None)
        run = None if token is None else self.find(key)
        if run is not None and not do.data_ptr() & 15 and _on_current_device(do):
            return run((q, k, v, o, do, lse), None, extras)
        if token is not None and _readable(q, k, v, o, do):
            layouts = tuple(map(layout, (q, k, v, o, do)))
            call = CallLayout(self.task, layouts, q.dtype, q.device, *kinds_of_rows(extras))
            self.launches.put(key, prepared_backward(call))
        *grads, _, _, delta = backward((q, k, v, o, lse), (do, None), self.task, extras)
        return *grads, *_present(delta)


def _stream(x: Tensor) -> int:
    return raw_stream(x.get_device()) if x.is_cuda else 0


def _in_graph(x: Tensor) -> bool:
    """Whether a launch now is recorded, to be replayed later."""
    return x.is_cuda and _is_capturing()


def _on_current_device(x: Tensor) -> bool:
    index = x.get_device()
    return index < 0 or index == current_device()


def _readable(*tensors: Tensor) -> bool:
    """Whether the kernels can read all tensors without a copy: on the current device, rows aligned to 16 bytes. After
    q and k, tensors are as wide as values."""
    of_values = _min_value_width(tensors[0])
    fit = all(
        not x.data_ptr() & 15 and aligned_rows(x, 1 if at < 2 else of_values) is x
        for at, x in enumerate(tensors)
    )
    return fit and _on_current_device(tensors[0])


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, lengths, attention):
        extras = PLAIN if sink is lengths is None else Extras(lengths=lengths, sink=sink)
        o, lse, ctx.token = attention.forward(q, k, v, extras)
        ctx.save_for_backward(q, k, v, o, lse, sink, lengths)
        ctx.attention = attention
        return o

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        saved, (sink, lengths) = tensors[:5], tensors[5:]
        if _grad_enabled():  # create_graph=True: these gradients will be differentiated again
            (q, k, v, _, _), task = saved, ctx.attention.task
            terms = {
                "scale": task.scale,
                "softcap": task.softcap,
                "sink_logits": sink,
                "at": (task.start, task.step),
            }
            found = gradients((grad, None), Call(q, k, v, task.pattern, None, lengths, **terms))
            return *found, *(None,) * (6 - len(found))
        if sink is lengths is None:
            return *ctx.attention.backward(ctx.token, saved, grad), None, None, None
        learned = sink if ctx.needs_input_grad[3] else None
        extras = on_device(Extras(lengths=lengths, sink=learned), grad.device)
        dq, dk, dv, *delta = ctx.attention.backward(ctx.token, saved, grad, extras)
        if learned is None:
            return dq, dk, dv, None, None, None
        o, lse = saved[3:]
        delta = delta[0] if delta else (grad * o).sum(-1, dtype=lse.dtype)
        return dq, dk, dv, sink_gradient(sink, lse, delta), None, None


_apply = compat.apply_of(_Repeated)
