"""From tensors to launches: forward, backward, and repeated calls with the same shapes and strides."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ... import compat
from ...errors import BackendError
from ..call import NO_SEED, Cache, Call, Extras, aligned_rows
from ..reference_backend import gradients
from . import few_queries, launches
from .call import PLAIN, CallLayout, Task, call_layout, kinds_of_rows, on_device, padded
from .documents import Packed
from .prepared import PREPARED, current_device, hooks_set, raw_stream

# Prepared calls: for one layout of the tensors, what is allocated and launched.


def _launches_of(task: Task) -> Cache:
    return task.pattern.cache if isinstance(task.pattern, Packed) else PREPARED


def _cached_by_layout(prepare: Callable[[CallLayout], Any]) -> Callable[[CallLayout], Any]:
    def lookup(call: CallLayout) -> Any:
        cache, key = _launches_of(call.task), (prepare, *call)
        if cache is not PREPARED:  # it belongs to ids: no key refers to their pattern, which refers to it
            key = prepare, *tuple(vars(call.task).values())[1:], *call[1:]
        cached = cache.get(key)
        return cache.put(key, prepare(call)) if cached is None else cached

    return lookup


@_cached_by_layout
def prepared_forward(call: CallLayout) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, extras, spare_lse) → (o, lse)."""
    passes, program = launches.forward(call)
    shape, device, strides = call.output.shape, call.device, call.output.stride
    empty_output = partial(torch.empty_strided, shape, strides, dtype=call.dtype, device=device)
    empty_like, run, plain = torch.empty_like, program.run, not call.optional_inputs
    covers, o_is_like_q = passes.covers, call.tensors[0] == call.output
    lse_like = torch.empty(shape[:3], dtype=torch.float32, device=device)
    lse_like.untyped_storage().resize_(0)  # a shape without memory: 6 µs by `empty_like`, 9 by `empty`
    # A kernel that continues from an earlier pass reads lse, so the spare tensor cannot be used.
    reads_lse, joined = passes.accumulate, not call.has_sink or launches.joins_sink(call, passes)

    def forward(q, k, v, extras, spare_lse=None):
        if covers:
            o = empty_like(q) if o_is_like_q else empty_output()
            lse = empty_like(lse_like) if spare_lse is None or reads_lse else spare_lse
        else:
            o = empty_output().zero_()
            lse = torch.full(shape[:3], -torch.inf, dtype=torch.float32, device=device)
        inputs = () if plain else _present(*extras[:3], extras.at, extras.sink)
        run((q, k, v, o, lse, *inputs), extras.seed)
        return (o, lse) if joined else join_sink(o, lse, extras.sink)

    return forward


@_cached_by_layout
def prepared_backward(call: CallLayout) -> Callable[..., tuple[Tensor | None, ...]]:
    """((q, k, v, o, do, lse), dlse, extras) → the gradients of q, k and v; if the call has other inputs, also those
    of table, slopes and sink, None for what needs none."""
    outputs, program = launches.backward(call)
    run, plain = program.run, not call.bias_gradient and not call.optional_inputs
    learned = call if call.bias_gradient else None  # no reference to ids, whose cache refers to this function

    def backward(tensors, dlse, extras):
        results = outputs(tensors)
        inputs = () if plain else _present(dlse, *extras[:3], extras.at, extras.sink)
        run((*tensors, *inputs, *results), extras.seed)
        if plain:
            return results
        dq, dk, dv, *sums = results
        of_bias: tuple[Tensor | None, ...] = (None, None)
        if learned is not None:
            of_bias, sums = launches.bias_gradients(learned, sums), []
        dsink = None if extras.sink is None else sink_gradient(extras.sink, tensors[3:], dlse, *sums)
        return dq, dk, dv, *of_bias, dsink

    return backward


def sink_gradient(sink: Tensor, tensors: Any, dlse: Tensor | None, delta: Tensor | None = None) -> Tensor:
    """tensors: o, do and lse, with the sink in o and lse; delta: Σ do ∘ o − dlse, if the kernels give it."""
    o, do, lse = tensors
    if delta is None:
        delta = (do * o).sum(-1, dtype=lse.dtype)
        delta = delta if dlse is None else delta - dlse
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
    extras = on_device(extras, q.device)
    with _device_of(q):
        o, lse = prepared_forward(call_layout(task, (q, k, v), extras))(q, k, v, extras)
    return _narrowed(o, d_v), lse


def backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    task: Task,
    extras: Extras = PLAIN,
    bias_gradient: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, of table and slopes if `bias_gradient`, and of a sink in `extras`; otherwise None.

    saved: q, k, v, o, lse. grads: of o and of lse; None: it has no gradient.
    """
    (q, k, v, o, lse), (do, dlse) = saved, grads
    do = torch.zeros_like(o) if do is None else do
    if not q.numel() or not k.numel():
        of_sink = None if extras.sink is None else sink_gradient(extras.sink, (o, do, lse), dlse)
        return *(None if x is None else torch.zeros_like(x) for x in (q, k, v, *extras[:2])), of_sink
    d_k, d_v, least = q.shape[-1], v.shape[-1], _min_value_width(q)
    q, k = aligned_rows(q), aligned_rows(k)
    v, o, do = (aligned_rows(x, least) for x in (v, o, do))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    inputs = on_device(extras, q.device)
    run = prepared_backward(call_layout(task, (q, k, v, o, do), inputs, dlse is not None, bias_gradient))
    with _device_of(q):
        dq, dk, dv, *others = run((q, k, v, o, do, lse), dlse, inputs)
    dtable, dslopes, of_sink = others or (None, None, None)
    if bias_gradient:
        dtable, dslopes = map(_like_parameter, (dtable, dslopes), extras[:2])
    return _narrowed(dq, d_k), _narrowed(dk, d_k), _narrowed(dv, d_v), dtable, dslopes, of_sink


def _narrowed(x: Tensor, d: int) -> Tensor:
    return x if x.shape[-1] == d else x[..., :d].contiguous()


def _like_parameter(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)


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
    (q, k, v, lengths, at, sink) → o: integers per batch row, and a number per head.
    """

    def __init__(self, task: Task, learns: bool, repeats: bool = True):
        """repeats: launches are cached by the strides of the tensors. If not, `attend` runs one call of any kind."""
        self.task, self.learns, self.token = task, learns, object() if repeats else None
        self.launches = _launches_of(task)
        self.lookup = self.launches.get
        # Receives the lse of calls without gradients, which is never read. It is used only on the stream it was
        # created on, and not in a CUDA graph: a kernel could still write to it after its memory was reused.
        self.spare: Tensor | None = None
        self.stream = -1
        self.few_queries: CallLayout | None = None  # of the last call that was prepared, if it had few
        # What layers of a decoder share: the call that `with_other_keys` reuses, its key, program and numbers.
        self.other_keys: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None) -> Tensor:
        if not rows:
            return _apply(q, k, v, self) if self.learns else self.forward(q, k, v)[0]
        lengths, at, sink = rows
        if self.learns:
            return _apply(q, k, v, self, None, None, lengths, NO_SEED, at, sink)
        return self.forward(q, k, v, Extras(lengths=lengths, at=at, sink=sink))[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras = PLAIN) -> tuple[Tensor, Tensor, Any]:
        """o, lse, and the key under which the backward pass finds its launches."""
        if self.token is None:
            return *forward(q, k, v, self.task, extras), None
        key: tuple[Any, ...] = self.token, q.stride(), k.stride(), v.stride()
        if extras is not PLAIN:
            extras = on_device(extras, q.device)
            key = *key, *kinds_of_rows(extras)
        run, token = self.lookup(key, _UNKNOWN)
        aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        if run is not None and aligned and _on_current_device(q):
            return *run(q, k, v, extras, self._spare(q)), token
        token = None
        if _readable(q, k, v):
            call = call_layout(self.task, (q, k, v), extras)
            run = prepared_forward(call)
            _, token = self.launches.put(key, (run, object()))
            if extras is PLAIN and call.has_few_queries and not self.learns:
                self.few_queries = call
        o, lse = forward(q, k, v, self.task, extras)
        if not self.learns and lse.numel() <= MAX_SPARE and not _in_graph(q):
            self.spare, self.stream = lse, _stream(q)
        return o, lse, token

    def with_other_keys(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """o, where nothing but the number of keys differs from an earlier call; None: it has to be prepared."""
        call, key = self.few_queries, (k.shape[2], v.shape[2], q.stride(), k.stride(), v.stride())
        if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or not _on_current_device(q):
            return None
        of, known, program, numbers = self.other_keys
        if of is not call or known != key:
            program, same_queries = few_queries.forward(call), q.stride() == call.tensors[0].stride
            numbers = few_queries.numbers_for(program.launches[0][0], call, k, v) if same_queries else None
            self.other_keys = call, key, program, numbers
        if numbers is None or not program.direct or hooks_set():
            return None
        o = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = self._spare(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse
        program.run((q, k, v, o, lse), numbers=numbers)
        return o

    def _spare(self, q: Tensor) -> Tensor | None:
        """The lse that may be overwritten."""
        return self.spare if self.stream == _stream(q) and not _in_graph(q) else None

    def backward(
        self, token: Any, saved: Any, grads: Any, extras: Extras = PLAIN, bias_gradient: bool = False
    ) -> tuple[Tensor | None, ...]:
        """As `backward`, without the last three if no input needs them; saved: with the strides they had forward."""
        if token is not None:
            (q, k, v, o, lse), (do, dlse) = saved, grads
            extras = extras if extras is PLAIN else on_device(extras, q.device)
            key = token, do.stride(), extras.sink is None
            run = self.lookup(key)
            if run is not None and not do.data_ptr() & 15 and _on_current_device(do):
                return run((q, k, v, o, do, lse), dlse, extras)
            if _readable(q, k, v, o, do):
                self.launches.put(key, prepared_backward(call_layout(self.task, (q, k, v, o, do), extras)))
        return backward(saved, grads, self.task, extras, bias_gradient)


def attend(task: Task, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """As `forward`, with gradients."""
    return _apply(q, k, v, PreparedAttention(task, True, repeats=False), *extras[:5], extras.sink)


def _stream(x: Tensor) -> int:
    return raw_stream(x.get_device()) if x.is_cuda else 0


def _in_graph(x: Tensor) -> bool:
    """Whether a launch now is recorded, to be replayed later."""
    return x.is_cuda and _is_capturing()


def _on_current_device(x: Tensor) -> bool:
    index = x.get_device()
    return index < 0 or index == current_device()


def _readable(*tensors: Tensor) -> bool:
    """Whether the kernels can read all tensors without a copy: not empty, on the current device, rows aligned to 16
    bytes. After q and k, tensors are as wide as values."""
    of_values = _min_value_width(tensors[0])
    fit = all(
        x.numel() and not x.data_ptr() & 15 and aligned_rows(x, 1 if at < 2 else of_values) is x
        for at, x in enumerate(tensors)
    )
    return fit and _on_current_device(tensors[0])


class _Attend(torch.autograd.Function):
    """(q, k, v) → o, or (q, k, v, table, slopes, lengths, seed, at, sink) → o; and lse, if the call is not repeated.

    A sink has no value: the other gradients have the formula without it, applied to the lse and o that include it.
    """

    @staticmethod
    def forward(ctx, q, k, v, attention, *inputs):
        ctx.attention = attention
        if not inputs:
            o, lse, ctx.token = attention.forward(q, k, v)
            ctx.save_for_backward(q, k, v, o, lse)
            return o
        table, slopes, lengths, ctx.seed, at, sink = inputs
        o, lse, ctx.token = attention.forward(
            q, k, v, Extras(table, slopes, lengths, ctx.seed, at, sink=sink)
        )
        ctx.save_for_backward(q, k, v, o, lse, table, slopes, lengths, at, sink)
        if attention.token is not None:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse=None):
        attention, tensors, grads = ctx.attention, ctx.saved_tensors, (do, dlse)
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        if _grad_enabled():  # create_graph=True: these gradients will be differentiated again
            results = _differentiable_gradients(grads, attention.task, *tensors)
        elif len(tensors) == 5:
            results = attention.backward(ctx.token, tensors, grads)
        else:
            *saved, table, slopes, lengths, at, sink = tensors
            _, _, _, _, of_table, of_slopes, _, _, _, of_sink = ctx.needs_input_grad
            extras = Extras(table, slopes, lengths, ctx.seed, at, sink=sink if of_sink else None)
            results = attention.backward(ctx.token, saved, grads, extras, of_table or of_slopes)
        if len(tensors) == 5:
            return *results[:3], None
        dq, dk, dv, dtable, dslopes, dsink = results if len(results) == 6 else (*results, None, None, None)
        return dq, dk, dv, None, dtable, dslopes, None, None, None, dsink


_apply = compat.apply_of(_Attend)  # under transforms of torch.func, calls run in compiled_ops


def _differentiable_gradients(grads: Any, task: Task, *saved: Any) -> tuple[Tensor | None, ...]:
    """Of q, k, v, table, slopes and sink, by the formula."""
    q, k, v, _, _, *inputs = saved
    table, slopes, lengths, at, sink = inputs or (None,) * 5
    if table is not None or slopes is not None or task.dropout_p:
        raise BackendError(
            "double backward (create_graph=True) is not supported by backend='triton' with bias by distance "
            "or dropout; use backend='sdpa'"
        )
    terms = task.scale, task.softcap, sink
    call = Call(
        q, k, v, task.pattern, None, lengths, None, *terms, at=(task.start, task.step) if at is None else at
    )  # fmt: skip
    dq, dk, dv, *dsink = gradients(grads, call)
    return dq, dk, dv, None, None, *(dsink or [None])
