"""regard as an attention implementation of Hugging Face transformers.

    >>> import regard.interop.huggingface  # registers "regard"  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")  # doctest: +SKIP

The masks of a model become patterns; `rg.use(model, pattern)` adds a pattern of yours to every layer, and
`explain(model, **inputs)` says what runs and why.
"""

from .registration import TESTED, register

register()

from .attention import LayerCall, explain  # noqa: E402  # these need transformers, whose absence `register` explains

__all__ = ["TESTED", "LayerCall", "explain", "register"]
