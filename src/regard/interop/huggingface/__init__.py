"""regard as an attention implementation of Hugging Face transformers.

    >>> import regard.interop.huggingface  # registers "regard"  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")  # doctest: +SKIP

The masks of a model become patterns; `rg.use(model, pattern)` adds a pattern of yours to every layer, and
`explain(model, **inputs)` says what runs and why.
"""

from .registration import TESTED, register

register()

# These need transformers, whose absence `register` explains.
from .attention import LayerCall, explain  # noqa: E402
from .cache import BoundedCache  # noqa: E402

__all__ = ["TESTED", "BoundedCache", "LayerCall", "explain", "register"]
