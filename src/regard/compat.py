"""Every private PyTorch or Triton API that regard uses, each behind a probe with a fallback.

A private API may change or vanish with any release. Each is looked up once, here; where it is missing or different, a
public replacement runs: slower, never wrong. Also here: the side effect of PyTorch's compiler that regard undoes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from inspect import isbuiltin
from math import inf
from typing import Any

import torch
from torch import Tensor

# What observes a call: transforms of torch.func, dispatch modes, autocast.


def _first(*candidates: Callable[[], Any]) -> Any:
    """The first candidate that can be looked up."""
    for candidate in candidates:
        try:
            return candidate()
        except AttributeError:
            continue
    raise AssertionError("the last candidate needs no private API")


def _from_python_dispatch(name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module("torch.utils._python_dispatch"), name)


def _nested_gradients() -> Callable[[], bool]:
    stack, gradient = torch._C._functorch.get_interpreter_stack, torch._C._functorch.TransformType.Grad
    return lambda: sum(each.key() == gradient for each in stack() or ()) > 1


# () → bool: whether a transform of torch.func is active. If that is unknown, a call counts as observed: it then runs
# by operations that every transform supports.
transforms_active: Callable[[], bool] = _first(
    lambda: torch._C._are_functorch_transforms_active,
    lambda: lambda level=torch._C._functorch.maybe_current_level: level() is not None,
    lambda: lambda: True,
)
# () → bool: whether a gradient of torch.func is within another one. Unknown: it is, in any transform.
nested_gradients: Callable[[], bool] = _first(_nested_gradients, lambda: lambda: True)
# x → bool: whether torch.vmap maps over x; whether x is many gradients, as under is_grads_batched=True.
is_mapped: Any = _first(lambda: torch._C._functorch.is_batchedtensor, lambda: lambda x: False)
is_batched: Any = _first(lambda: torch._C._functorch.is_legacy_batchedtensor, lambda: lambda x: False)
# () → number of active dispatch modes, or the innermost of them.
dispatch_modes: Callable[[], Any] = _first(
    lambda: torch._C._len_torch_dispatch_stack,
    _from_python_dispatch("_get_current_dispatch_mode"),
    lambda: lambda: True,
)
autocast_active: Callable[[], bool] = _first(
    lambda: torch._C._is_any_autocast_enabled,
    lambda: lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
)


def sizes_are_symbols() -> bool:
    """Whether a size may stand for others: under torch.compile, torch.export and torch.jit.trace (a tensor there)."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def higher_derivatives() -> bool:
    """Whether forward-mode differentiation is active, or a gradient of torch.func within another one."""
    forward = getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    return forward or (transforms_active() and nested_gradients())


# Dynamo, which cannot trace this, calls it: it is within the same transforms then, and guards its graphs by them.
higher_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]
not_compiled: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)  # Dynamo is not imported


def version(x: Any) -> int | None:
    """How often the tensor x was written to; None where that is not counted, so that nothing can be cached by it."""
    return None if x.is_inference() else getattr(x, "_version", None)


def view_base(x: Any) -> Tensor | None:
    """The tensor whose memory x is a view of; None where that is unknown."""
    return getattr(x, "_base", None)


# Autograd.


def _softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    return grad.sub_((grad * weights).sum(-1, keepdim=True)).mul_(weights)


def _fused_softmax_backward() -> Callable[[Tensor, Tensor], Tensor]:
    fused = torch.ops.aten._softmax_backward_data.out
    return lambda grad, weights: fused(grad, weights, -1, grad.dtype, grad_input=grad)


# (grad, weights) → weights ∘ (grad − Σ grad ∘ weights) over the last axis, written to grad.
softmax_backward_: Any = _first(_fused_softmax_backward, lambda: _softmax_backward)

# PyTorch's fused CPU attention with its log-sum-exp.

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_SCHEMAS = {
    FLASH: (
        f"aten::{FLASH}(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    f"{FLASH}_backward": (
        f"aten::{FLASH}_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


def flash_schema(name: str) -> str:
    """The schema that this PyTorch has for an operation of that name, or "nothing"."""
    op = getattr(getattr(torch.ops.aten, name, None), "default", None)
    return "nothing" if op is None else str(op._schema)


def has_flash() -> bool:
    """Whether both fused operations are those that this file was written for."""
    return all(flash_schema(name) == schema for name, schema in FLASH_SCHEMAS.items())


def _scores(query, key, is_causal, attn_mask, scale) -> Tensor:
    group = query.shape[1] // key.shape[1]
    s = (query @ key.repeat_interleave(group, 1).mT) * scale
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -inf)
    return s if attn_mask is None else s + attn_mask


def _flash_by_products(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """The same numbers by products; n × m scores are held."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    s = _scores(q, k, is_causal, attn_mask, scale)
    lse = s.logsumexp(-1)
    weights = (s - lse.masked_fill(lse == -inf, 0.0)[..., None]).exp()
    o = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return o.to(query.dtype), lse


def _flash_backward_by_products(grad_out, query, key, value, out, logsumexp, *flags: Any, **options: Any):
    """flags: dropout_p, is_causal; options: attn_mask, scale."""
    attn_mask, scale = options["attn_mask"], options["scale"]
    wide = torch.promote_types(query.dtype, torch.float32)
    do, q, k, v, o = (x.to(wide) for x in (grad_out, query, key, value, out))
    group = q.shape[1] // k.shape[1]
    weights = (_scores(q, k, flags[1], attn_mask, scale) - logsumexp[..., None]).exp()
    ds = weights * (do @ v.repeat_interleave(group, 1).mT - (do * o).sum(-1, keepdim=True))
    dq = ds @ k.repeat_interleave(group, 1) * scale
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q * scale, weights.mT @ do))
    return tuple(g.to(query.dtype) for g in (dq, dk, dv))


_fused = has_flash()
# (query, key, value, dropout_p, is_causal, *, attn_mask, scale) → (output, logsumexp), and its gradients.
flash_forward: Callable[..., tuple[Tensor, Tensor]]
flash_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
if _fused:
    flash_forward = getattr(torch.ops.aten, FLASH).default
    flash_backward = getattr(torch.ops.aten, f"{FLASH}_backward").default
else:
    flash_forward, flash_backward = _flash_by_products, _flash_backward_by_products
# The forward operation without the dispatcher's Python, which takes a tenth of a short call.
flash_forward_direct: Any = getattr(torch, FLASH, flash_forward) if _fused else flash_forward

# PyTorch's own function. Where a program has put another in its place, which may call regard, the operator itself.
_sdpa = torch.nn.functional.scaled_dot_product_attention
sdpa: Any = _sdpa if isbuiltin(_sdpa) else torch.ops.aten.scaled_dot_product_attention.default

# Before 2.13, the fused kernels compare the batch of a mask with 1, which fails where data decide its size, and
# FlexAttention on the CPU refuses q, k and v in one buffer, such as parts of one projection in a compiled model.
_compares_batch = flex_needs_own_buffers = torch.__version__ < "2.13"


def needs_formula(mask: Tensor | None) -> bool:
    """Whether an export of `sdpa` with this mask is possible by PyTorch's formula only: data decide its batch."""
    size = None if mask is None else mask.shape[0]
    if not _compares_batch or torch.compiler.is_dynamo_compiling() or not isinstance(size, torch.SymInt):
        return False
    return bool(import_module("torch.fx.experimental.symbolic_shapes").free_unbacked_symbols(size))


FUSED_NODE = "ScaledDotProduct"  # how the names of the nodes of PyTorch's fused attention begin
# () → the node whose backward runs, in a hook of it.
current_node: Callable[[], Any] | None = _first(lambda: torch._C._current_autograd_node, lambda: None)


@cache
def can_read_flash_node() -> bool:
    """Whether a hook can read q, k, v, mask, is_causal and scale from the node of PyTorch's own CPU attention."""
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # not those of a checkpoint
    with torch.inference_mode(False), torch.enable_grad(), own:
        x = torch.zeros(1, 1, 1, 8, device="cpu", requires_grad=True)
        return current_node is not None and saved_by_fused_node(sdpa(x, x, x).grad_fn) is not None


def saved_by_fused_node(node: Any = None) -> tuple[Any, ...] | None:
    """q, k, v, mask, is_causal and scale of such a node, by default of the one whose hook runs; None of another."""
    names = tuple(f"_saved_{x}" for x in ("query", "key", "value", "is_causal", "scale"))
    node = current_node() if node is None and current_node else node
    if not node or not node.name().startswith(FUSED_NODE) or not all(hasattr(node, x) for x in names):
        return None
    q, k, v, is_causal, scale = (getattr(node, x) for x in names)
    masks = (getattr(node, x) for x in ("_saved_attn_mask", "_saved_attn_bias") if hasattr(node, x))
    return q, k, v, next(masks, None), is_causal, scale


# Interception of operators, for rg.look.


class _NoDispatchMode(nullcontext):
    """In place of TorchDispatchMode: no operator is intercepted, only functions are."""

    def __enter__(self) -> "_NoDispatchMode":
        return self


DispatchMode: Any = _first(_from_python_dispatch("TorchDispatchMode"), lambda: _NoDispatchMode)
CAN_DISPATCH = DispatchMode is not _NoDispatchMode
# () → context manager in which no dispatch mode is active. Without it, the interceptor's own pause suffices.
without_dispatch_modes: Any = _first(_from_python_dispatch("_disable_current_modes"), lambda: nullcontext)


def clear_compiler_tables() -> None:
    """Clear the compiler's table of PyTorch's functions, which is built on first use; it is built again if needed."""
    getattr(sys.modules.get("torch._dynamo.trace_rules"), "clear_lru_cache", lambda: None)()


def aten_operators(*names: str) -> set[Any]:
    """The operators torch.ops.aten.<name> that this PyTorch has."""
    return {getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)}


def aten_operator(name: str) -> Any:
    """The operator torch.ops.aten.<name>, or an object that equals no operator."""
    return getattr(torch.ops.aten, name, object())


def operator_arguments(func: Any) -> list[tuple[str, Any]]:
    """The names and defaults of an operator's arguments."""
    schema = getattr(func, "_schema", None)
    return [] if schema is None else [(a.name, a.default_value) for a in schema.arguments]


def storage_id(x: Tensor) -> int:
    """A number that two tensors share if they share a storage."""
    storage = x.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr() or id(storage)


# CUDA and Triton. Triton itself is imported by the functions below, when a kernel first runs.
# () → index of the current CUDA device.
current_device: Any = _first(lambda: torch._C._cuda_getDevice, lambda: torch.cuda.current_device)
# (device) → handle of its current stream.
raw_stream: Callable[[int], int] = _first(
    lambda: torch._C._cuda_getCurrentRawStream,
    lambda: lambda device: torch.cuda.current_stream(device).cuda_stream,
)
# () → bool: whether the current stream is being captured into a CUDA graph.
stream_is_capturing: Callable[[], bool] = _first(
    lambda: torch._C._cuda_isCurrentStreamCapturing, lambda: torch.cuda.is_current_stream_capturing
)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its check for transforms of torch.func, which takes 5 µs; for calls without any."""
    inner = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if inner is None else inner


def triton_hooks() -> Callable[[], bool]:
    """() → bool: whether a profiler has set a hook on Triton's launches. Unknown: it has, so all goes by Triton."""
    try:
        from triton import knobs

        runtime = knobs.runtime
        runtime.launch_enter_hook, runtime.launch_exit_hook  # noqa: B018 (the probe)
    except (ImportError, AttributeError):
        return lambda: True

    def hooks_set() -> bool:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        try:
            return bool(enter.calls or leave.calls)
        except AttributeError:  # a function or None, in other versions
            return bool(enter) or bool(leave)

    return hooks_set


def triton_launcher(run: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments before the metadata.

    In Triton 3.6 a Python launcher wraps a C function and only adds these four for kernels without scratch memory;
    calling the C function saves a quarter of a launch. Elsewhere the Python launcher runs.
    """
    inner = getattr(run, "launch", None)
    known = hasattr(run, "launch_pdl") and not hasattr(run, "arg_annotations")
    if inner is None or not known or run.global_scratch_size or run.profile_scratch_size:
        return run, ()
    return inner, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def has_gluon() -> bool:
    """Whether this Triton has Gluon with the parts for Hopper, in which the streaming kernels are written."""
    try:
        gluon()
    except (ImportError, AttributeError):
        return False
    return True


def gluon() -> tuple[Any, Any, Any]:
    """Gluon, its language, and its module for Hopper."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import hopper

    assert hopper.warpgroup_mma and hopper.async_copy
    return gluon, language, hopper


# Modules and lists of tensors.

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(*modules: torch.nn.Module) -> bool:
    """Whether a hook is registered on one of these modules. Where PyTorch does not tell, there may be one."""
    return any(getattr(module, name, True) for module in modules for name in HOOKS)


# (tensors, ends, weight): tensors ← tensors + weight · (ends − tensors), in place, by one call for all of them.
foreach_lerp_: Callable[[list[Tensor], list[Tensor], float], Any] = _first(
    lambda: torch._foreach_lerp_,
    lambda: lambda tensors, ends, weight: [t.lerp_(e, weight) for t, e in zip(tensors, ends, strict=True)],
)
# (tensors, sources): each source is copied into its tensor, in the tensor's dtype, by one call for all of them.
foreach_copy_: Callable[[list[Tensor], list[Tensor]], Any] = _first(
    lambda: torch._foreach_copy_, lambda: lambda to, of: [t.copy_(s) for t, s in zip(to, of, strict=True)]
)


# Products with a constant matrix, on a CPU in inference.
PACKED_FOR_ROWS = 64  # the number of rows for which the packed layout is chosen; others are as fast


def constant_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """x (b, d_in) → x · weightᵀ + bias for constants; packed it takes 0.1 to 0.8 of the time (AMD EPYC)."""
    if weight.dtype == torch.float32 and torch.backends.mkldnn.enabled and _can_pack():
        return _packed_product(weight, bias)
    transposed = weight.t().contiguous()
    return lambda x: torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)


def _packed_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    product = torch.ops.mkldnn._linear_pointwise
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return lambda x: product(x, packed, bias, "none", [], "")


@cache
def _can_pack() -> bool:
    """The private operators may be missing, take other arguments or compute something else."""
    weight, x = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    try:
        available = torch.backends.mkldnn.is_available()
        return available and torch.equal(_packed_product(weight)(x), x @ weight.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


# Numbers below 2⁻¹⁰²² (2⁻¹²⁶ in float32) as IEEE 754 has them: PyTorch's compiler links C++ for the CPU with fast
# math, and loading that code makes the thread treat such numbers as zero.


@contextmanager
def denormals_preserved() -> Iterator[None]:
    """Whatever is compiled inside, denormal numbers are treated afterwards as they were before."""
    before = denormals_flushed()
    try:
        yield
    finally:
        if denormals_flushed() and not before:
            torch.set_flush_denormal(False)


def denormals_flushed() -> bool:
    """Whether half of the smallest normal number counts as zero."""
    return sys.float_info.min / 2 == 0.0


# Running modules on meta tensors as if on another device, for rg.cost.
AUTOCAST_KEY = "AutocastIPU"  # a dispatch key that no backend of today uses: its kernels are those of rg.cost


def has_kernel(name: str, key: str) -> bool:
    """Whether the operator `aten::name.overload` has a C++ kernel of this kind, such as "AutocastCUDA"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def call_parts(op: Any, *args: Any, **kwargs: Any) -> Any:
    """op(…) by the operators that define it, which dispatch modes intercept; NotImplemented if that is unknown."""
    explicit, call = "CompositeExplicitAutograd", getattr(op, "_op_dk", None)
    kind = next((k for k in (explicit, f"{explicit}NonFunctional") if has_kernel(op.name(), k)), None)
    return call(getattr(torch._C.DispatchKey, kind), *args, **kwargs) if call and kind else NotImplemented


def autocast_operators(device: str) -> list[str]:
    """The operators, "aten::name.overload", that autocast treats on this device ("CPU" or "CUDA")."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n for n in names if n.startswith("aten::") and has_kernel(n, f"Autocast{device}"))


def register_autocast(kernels: dict[str, Callable[..., Any]]) -> Any:
    """Python kernels of autocast, by operator, that run only inside `autocast_simulated`."""
    operators, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, AUTOCAST_KEY)
    for name, kernel in kernels.items():
        operators.impl(name.removeprefix("aten::"), kernel, AUTOCAST_KEY)
    return operators, others


@contextmanager
def autocast_simulated() -> Iterator[None]:
    """Operators pass the kernels of `register_autocast` first, on whatever device their tensors are."""
    set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
    set_included = torch._C._dispatch_tls_set_dispatch_key_included
    set_excluded(AUTOCAST_KEY, False)
    set_included(AUTOCAST_KEY, True)
    try:
        yield
    finally:
        set_included(AUTOCAST_KEY, False)
        set_excluded(AUTOCAST_KEY, True)


def below_autocast() -> Any:
    """Context manager in which those kernels do not run."""
    key = getattr(torch._C.DispatchKey, AUTOCAST_KEY)
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


# () → context manager in which function modes and subclasses do not intercept calls.
without_function_modes: Callable[[], Any] = _first(lambda: torch._C.DisableTorchFunction, lambda: nullcontext)


def node_number() -> int:
    """The number that the next node of the autograd graph gets."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node() -> int | None:
    """The number of the node whose backward runs; None outside a backward pass."""
    return int(node._sequence_nr()) if current_node and (node := current_node()) else None


def amp_availability() -> tuple[Any, str]:
    """(module, name) of the function by which torch.autocast decides that CUDA's autocast is not available."""
    return import_module("torch.cuda.amp.common"), "amp_definitely_not_available"


@contextmanager
def checkpoints_ignore_devices() -> Iterator[None]:
    """torch.utils.checkpoint compares shapes and dtypes of recomputed tensors, and not their devices."""
    checks = getattr(import_module("torch.utils.checkpoint"), "_allowed_determinism_checks_to_fns", {})
    before, checks["default"] = dict(checks), lambda x: {"shape": x.shape, "dtype": x.dtype}
    try:
        yield
    finally:
        checks.update(before)


def run_backward(loss: Tensor) -> None:
    """loss.backward(), with function modes active in it: a call of `backward` would suspend them."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(loss)
    else:
        one = torch.ones_like(loss, memory_format=torch.preserve_format)
        engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_held_once(x: Tensor) -> bool:
    """Whether autograd alone holds this gradient, which a dispatch mode receives, and its memory has no gaps."""
    of_memory = getattr(torch._C, "_storage_Use_Count", lambda _: 2)
    alone = getattr(x, "_use_count", lambda: 4)() == 4 and of_memory(x.untyped_storage()._cdata) == 2
    return alone and torch.empty_like(x).stride() == x.stride()
