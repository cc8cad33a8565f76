"""Runs attention on the CPU with one private PyTorch API missing after another: python without_private.py [NAME …]

regard looks every private API up when it is imported. So each is removed, regard is imported in a process of its own
and the API is put back, as PyTorch itself needs it; then results are compared with the reference backend.
"""

import os
import sys

import einops  # noqa: F401 — what regard imports, imported once for all
import jaxtyping  # noqa: F401
import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.testing

# By the name in regard.compat: what it is made of.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ATTRIBUTES = {
    "transforms_active": (torch._C, "_are_functorch_transforms_active"),
    "nested_gradients": (torch._C._functorch, "get_interpreter_stack"),
    "dispatch_modes": (torch._C, "_len_torch_dispatch_stack"),
    "autocast_active": (torch._C, "_is_any_autocast_enabled"),
    "flash_forward_direct": (torch, FLASH),
    "current_node": (torch._C, "_current_autograd_node"),
}
OPERATORS = {
    "softmax_backward_": "_softmax_backward_data",
    "flash_forward": FLASH,
    "flash_backward": f"{FLASH}_backward",
}


def remove(name: str):
    """Removes one API; gives what puts it back."""
    if name in ATTRIBUTES:
        holder, attribute = ATTRIBUTES[name]
        value = getattr(holder, attribute)
        delattr(holder, attribute)
        return lambda: setattr(holder, attribute, value)
    namespace, operator = type(torch.ops.aten), OPERATORS[name]
    real = namespace.__getattr__
    vars(torch.ops.aten).pop(operator, None)

    def look_up(self, attribute):
        if attribute == operator:
            raise AttributeError(attribute)
        return real(self, attribute)

    namespace.__getattr__ = look_up
    return lambda: setattr(namespace, "__getattr__", real)


def agree() -> None:
    """Dense, masked and sparse calls, gradients and double backward, against the reference."""
    import regard as rg

    g = torch.Generator().manual_seed(0)
    calls = [
        (7, rg.causal(), {}),
        (7, rg.window(2), {}),
        (131, rg.window(3), {}),
        (200, rg.window(8) | rg.every(16), {}),
        (200, rg.causal() & (rg.window(8) | rg.every(16)), {"return_lse": True}),
        (100, rg.causal(), {"lengths": torch.tensor([60])}),
        (64, rg.documents(torch.arange(64) // 8), {"backend": "tiles"}),
        (64, rg.causal(), {"bias": rg.position.ByDistance(slopes=torch.rand(4, generator=g).double())}),
    ]
    for n, pattern, options in calls:
        inputs = [
            torch.randn(1, 4, n, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)
        ]
        found = [results(rg, inputs, pattern, options | by) for by in ({}, {"backend": "reference"})]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def results(rg, inputs, pattern, options):
    with torch.no_grad():
        first = rg.attention(*inputs, pattern, **options)
    out = rg.attention(*inputs, pattern, **options)
    o = out[0] if isinstance(out, tuple) else out
    (dq, *_) = grads = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
    twice = torch.autograd.grad(dq.square().sum(), inputs)
    return [first[0] if isinstance(first, tuple) else first, o, *grads, *twice]


def main() -> int:
    torch.set_num_threads(1)
    failed = []
    for name in sys.argv[1:] or (*ATTRIBUTES, *OPERATORS):
        child = os.fork()  # with torch imported once for all, and regard in none
        if child == 0:
            put_back = remove(name)
            try:
                from regard import compat

                put_back()
                if name in ATTRIBUTES:
                    holder, attribute = ATTRIBUTES[name]
                    assert getattr(compat, name) is not getattr(holder, attribute), "it was not removed"
                else:
                    assert getattr(compat, name).__module__ == "regard.compat", "it was not removed"
                    assert "_fused" not in getattr(compat, name).__qualname__, "it was not removed"
                agree()
            except BaseException as error:
                print(f"without {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    print("failed without:", ", ".join(failed) or "none")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
