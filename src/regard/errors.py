"""The exceptions of regard:

RegardError
├── SpecError     an invalid declaration or option (also a ValueError)
├── ShapeError    tensors that do not fit together or do not fit the declaration (also a ValueError)
├── FormatError   a file or JSON text in the wrong format (also a ValueError)
└── BackendError  a backend requested by name that cannot run this call (also a RuntimeError)

A message contains the value that was passed, the numbers that conflict, and what would work.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

MAX_OFFSET = 1 << 40  # of queries: multiples of it, and products with other positions, fit 64 bits


class RegardError(Exception):
    """The base class of all errors that regard raises."""


class SpecError(RegardError, ValueError):
    """An invalid declaration or option."""


class ShapeError(RegardError, ValueError):
    """Tensors that do not fit together or do not fit the declaration."""


class FormatError(RegardError, ValueError):
    """A file or JSON text in the wrong format."""


class BackendError(RegardError, RuntimeError):
    """A backend requested by name that cannot run this call."""


DUAL_NUMBERS = (
    "this graph of sparse attention was compiled without forward-mode derivatives, and is called inside "
    "torch.autograd.forward_ad.dual_level(); use torch.func.jvp, which compiles another graph, or call "
    "torch.compiler.reset() and compile inside dual_level()"
)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the closest known name, or all of them.

    >>> nearest("gtp2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> nearest("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2'
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]}?" if close else "known: " + (", ".join(names) or "none")


def require_tensors(at: Any = None, scale: Any = None, **given: Any) -> None:
    """Refuse arguments that are not dense tensors, lengths and offsets that are not whole numbers, and a wrong scale.

    None is refused for x, q, k and v only; a bias may also be a value of this library.
    """
    import torch

    if torch.compiler.is_compiling():
        return
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            if x.is_nested or x.layout != torch.strided:
                kind = "nested" if x.is_nested else "sparse"
                raise ShapeError(
                    f"{name} is a {kind} tensor; give a dense one: a padded batch with lengths=, or rows one after "
                    "the other with pattern=rg.documents(ids)"
                )
            if name in ("sink_logits", "bias") and x.is_complex():
                raise ShapeError(f"{name} is {x.dtype}; scores are real numbers: give {name}.real")
            if name == "sink_logits" and x.dtype == torch.bool:
                raise ShapeError("sink_logits is torch.bool; one number per query head is needed, a score")
            continue
        if x is None and name not in "xqkv":
            continue
        if name == "bias" and not isinstance(x, list | tuple | int | float) and not hasattr(x, "__array__"):
            continue
        if x is None:
            raise ShapeError(f"{name} is None, not a tensor")
        raise ShapeError(f"{name} is of type {type(x).__name__}, not a tensor; use torch.as_tensor({name})")
    lengths = given.get("lengths")
    if lengths is not None and lengths.dtype == torch.bool:
        raise ShapeError(
            "lengths is torch.bool; whole numbers are needed: mask.sum(-1), if True is a real token and padding "
            "comes after them; else the first real key and the end of each row, (b, 2)"
        )
    if lengths is not None and (lengths.is_floating_point() or lengths.is_complex()):
        raise ShapeError(f"lengths is {lengths.dtype}; whole numbers are needed: lengths.long()")
    if isinstance(at, float):
        raise SpecError(f"at={at}: a query offset is a whole number")
    require_offset(at)
    if not isinstance(scale, Real | None) or isinstance(scale, bool):
        raise SpecError(f"scale={scale!r}: the factor of q·k is a number, or None for 1/√d_k")


def require_offset(at: Any) -> None:
    """Refuse query offsets, one or several, for which positions could overflow."""
    if any(
        isinstance(x, int) and abs(x) > MAX_OFFSET for x in (at if isinstance(at, tuple | list) else (at,))
    ):
        raise SpecError(
            f"at={at!r} is beyond ±2⁴⁰, and positions are computed in 64 bits; give a smaller offset"
        )


@contextmanager
def compiler_errors_named(backend: str) -> Iterator[None]:
    """An error of PyTorch's compiler becomes one that names the backend and its alternative."""
    try:
        yield
    except RuntimeError as e:
        of_compiler = getattr(sys.modules.get("torch._dynamo.exc"), "TorchDynamoException", ())
        if not isinstance(e, of_compiler):
            raise
        words = " ".join(str(e).strip().splitlines()[:2])
        raise BackendError(
            f"backend={backend!r} cannot run this: PyTorch's compiler fails ({words}); use backend='auto'"
        ) from e


_INSTEAD = {  # of arguments of other libraries
    "is_causal": "declare it: rg.attention(q, k, v, pattern=rg.causal())",
    "attn_mask": "give a bool tensor (True = may attend) or rg.causal(), … as pattern= and a float tensor that is "
    "added to the scores as bias=",
    "mask": "give a bool tensor (True = may attend) or rg.causal(), … as pattern=",
    "key_padding_mask": "give the number of real keys of each row as lengths=",
    "window_size": "declare it: pattern=rg.causal() & rg.window(before)",
    "causal": "declare it: rg.attention(q, k, v, pattern=rg.causal())",
    "dropout": "its name is dropout_p",
    "softmax_scale": "its name is scale",
    "score_mod": "give bias=, softcap= or sink_logits=",
    "block_mask": "give pattern=, which is one without a table",
    "need_weights": "the weights are rg.engine.attention.weights(q, k, pattern)",
    "enable_gqa": "heads are grouped wherever k and v have fewer of them than q",
}


def not_an_argument(foreign: dict[str, Any]) -> Exception:
    """The error for an unknown argument; for one of another library it says what to write instead."""
    for name in _INSTEAD.keys() & foreign:
        return SpecError(f"{name} is not an argument here; {_INSTEAD[name]}")
    return TypeError(f"attention() got an unexpected keyword argument {next(iter(foreign))!r}")


_REAL = "padding is given as the number of real tokens of each row"
_DECLARED = "it is declared: rg.Attention(…, {})"
_INSTEAD_IN_MODULES = {  # of arguments of the modules of other libraries
    "attention_mask": f"{_REAL}, mask.sum(-1)",
    "padding_mask": f"{_REAL}, (~mask).sum(-1) if True is padding",
    "key_padding_mask": f"{_REAL}, (~mask).sum(-1) if True is padding",
    "src_key_padding_mask": f"{_REAL}, (~mask).sum(-1) if True is padding",
    "mask": "a bool tensor is a pattern, where True is 'may attend'",
    "attn_mask": "a bool tensor is a pattern, where True is 'may attend'",
    "is_causal": _DECLARED.format("pattern=rg.causal()"),
    "causal": _DECLARED.format("pattern=rg.causal()"),
    "dropout": _DECLARED.format("dropout=0.1"),
    "need_weights": "the weights are returned by return_weights=True",
    "output_attentions": "the weights are returned by return_weights=True",
    "key": "keys and values are computed from the context",
    "value": "keys and values are computed from the context",
    "memory": "keys and values are computed from the context",
    "encoder_hidden_states": "keys and values are computed from the context",
    "past_key_values": "earlier keys are held by a cache, model.cache()",
    "use_cache": "earlier keys are held by a cache, model.cache()",
    "token_type_ids": "the types of tokens are called types",
    "position_ids": "positions are counted, in each of several documents from 0 on",
    "labels": "the loss is computed from the logits, by torch.nn.functional.cross_entropy",
}


def not_an_argument_of(module: Any, foreign: dict[str, Any]) -> Exception:
    """The same for a module: what is meant here, if that is known, and what it takes."""
    from inspect import signature

    name, kind = next(iter(foreign)), type(module)
    takes = ", ".join(p for p in signature(kind.forward).parameters if p not in ("self", "foreign"))
    if name in _INSTEAD_IN_MODULES:
        return SpecError(
            f"{name} is not an argument of {kind.__name__}: {_INSTEAD_IN_MODULES[name]}. It takes {takes}"
        )
    return TypeError(f"{kind.__name__} got an unexpected keyword argument {name!r}; it takes {takes}")


def not_a_pattern(given: Any, also: str = "", where: str = "") -> Exception:
    """The error for what is given as a pattern and is none. also: what else would do; where: the beginning."""
    kind, shape = type(given), getattr(given, "shape", None)
    name = "tensor" if kind.__name__ == "Tensor" else kind.__name__
    what = f"a {name} of shape {tuple(shape)}" if isinstance(shape, tuple) else f"a {name}"
    what = repr(given) if isinstance(given, str | int | float | None) else what
    if isinstance(given, type):
        what, use = given.__name__, f"write it with parentheses: rg.{given.__name__}(…)"
    elif isinstance(given, str):
        use = f"use rg.causal(), rg.window(2), …{also}; of a text, rg.Pattern.from_text({given!r})"
    elif kind.__name__ == "BlockMask":
        use = "declare it: rg.causal() & …; FlexAttention takes the pattern's block_mask(n)"
    elif kind.__name__ == "ndarray":
        what, use = f"an array of shape {shape}", "use torch.as_tensor(mask)"
    elif callable(given):
        use = "use rg.where(function)"
    else:
        use = f"use rg.causal(), rg.window(2), …{also}"
    return SpecError(f"{where}{what} is not a pattern; {use}")


def require_one_kind(q: Any, k: Any, v: Any) -> None:
    """Refuse tensors of several devices or dtypes, and of dtypes that attention does not compute in."""
    if not (q.device == k.device == v.device):
        raise ShapeError(f"q is on {q.device}, k on {k.device}, v on {v.device}; put all three on one device")
    if not (q.dtype == k.dtype == v.dtype):
        raise ShapeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give all three one dtype")
    if not q.is_floating_point():
        raise ShapeError(f"q, k and v are {q.dtype}; attention needs floating-point numbers: x.float()")
    if q.element_size() == 1:
        raise ShapeError(f"q, k and v are {q.dtype}; at least 16 bits are needed: x.bfloat16()")


def in_context_parallel() -> bool:
    """Whether PyTorch's context_parallel has divided sequences among processes: it replaces PyTorch's attention."""
    import torch

    module = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", "")
    return "context_parallel" in str(module)


def require_whole_sequences(q: Any, k: Any, v: Any, runs_sharded: bool) -> None:
    """Refuse sequences of which a process has a part, and DTensors that PyTorch cannot compute a pattern with.

    runs_sharded: PyTorch's own attention, which takes DTensors, runs this call without a mask.
    """
    import torch

    if torch.compiler.is_compiling():
        return
    if in_context_parallel():
        raise BackendError(
            "inside torch's context_parallel each process has a part of the sequence, and rg.attention would attend "
            "to the keys of that part only; use F.scaled_dot_product_attention there, or leave the sequence whole"
        )
    if not runs_sharded and any(hasattr(x, "device_mesh") for x in (q, k, v)):
        raise ShapeError(
            "q, k or v is a DTensor, which has no rules for this pattern; where processes have whole sequences (of "
            "some heads or batch rows), use torch.distributed.tensor.experimental.local_map around rg.attention, or "
            "x.to_local()"
        )


def require_device(call: Any) -> None:
    """Refuse what is on another device than the queries: the data of a pattern, a table, a bias, a sink.

    Lengths and query offsets may be on the CPU: they are small, and moved.
    """
    q, bias = call.q, call.bias
    named = {"bias": bias} if not hasattr(bias, "slopes") else {"table": bias.table, "slopes": bias.slopes}
    named |= {"pattern": call.table, "sink_logits": call.sink_logits, "lengths": call.lengths, "at": call.at}
    for name, x in named.items():
        there = q.device if isinstance(x, int) else getattr(x, "device", q.device)
        if isinstance(there, str) or there == q.device:  # numbers of NumPy say "cpu"
            continue
        if not (name in ("lengths", "at") and there.type == "cpu"):
            raise ShapeError(
                f"{name} is on {there}, and q on {q.device}; move it: {name}.to({str(q.device)!r})"
            )
    for word in call.pattern.leaves() if call.pattern.has_data else ():
        if word.device not in (None, q.device):
            raise ShapeError(
                f"the data of {word!r} are on {word.device}, and q on {q.device}; make the pattern of a tensor on "
                f"{q.device}: x.to({str(q.device)!r})"
            )


_BIASES = "none", "tensor", "distance"


def read_facts(kinds: dict[str, Any], n: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of `explain` with sizes, checked, with the defaults that depend on others.

    Sizes are whole numbers, and whether a call has some tensor is True or False: tensors are for explain(q, k, v, …).
    """
    import torch

    if n is None:
        raise SpecError(
            "n is missing: rg.explain(pattern, n=1024), or give the call: rg.explain(q, k, v, pattern)"
        )
    for name, x in given.items():
        if name not in kinds:
            raise SpecError(f"explain() has no argument {name!r}; {nearest(name, kinds)}")
        if kinds[name] is int and (isinstance(x, bool) or not isinstance(x, int) or x < 0):
            raise SpecError(f"{name}={x!r}: a whole number is needed")
        if kinds[name] is bool and not isinstance(x, bool):
            what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise SpecError(
                f"{name} is {what}; with sizes instead of tensors, say True or False: {name}=True"
            )
    if isinstance(given.get("at"), torch.Tensor):
        raise SpecError("at is a tensor; with sizes instead of tensors, say row_offsets=True")
    if given.get("bias", "none") not in _BIASES:
        known = ", ".join(map(repr, _BIASES))
        raise SpecError(f"bias={given['bias']!r}; with sizes instead of tensors, use {known}")
    require_tensors(at=given.get("at"), scale=given.get("scale"))
    return {
        "d_v": given.get("d_k", 64),
        "bias_grad": given.get("grad", False) and given.get("bias", "none") != "none",
        **given,
        "lengths": given.get("lengths", False) or given.get("left_padding", False),
        "dtype": _dtype(given.get("dtype", torch.float32)),
        "device": _device(given.get("device", "cpu")),
    }


def _dtype(given: Any) -> Any:
    import torch

    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        known = "float32", "bfloat16", "float16", "float64"
        raise SpecError(f"unknown dtype {given!r}; {nearest(str(given), known)}")
    return found


def _device(given: Any) -> str:
    import torch

    try:
        return str(torch.device(given))
    except (RuntimeError, TypeError) as e:
        raise SpecError(f"unknown device {given!r}; use 'cpu' or 'cuda'") from e
