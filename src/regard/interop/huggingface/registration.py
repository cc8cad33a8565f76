"""Adds "regard" to the attention implementations and to the mask functions of transformers."""

import warnings

from ...errors import SpecError

NAME = "regard"
TESTED = "5.22"  # the version of transformers that the table of model families was made with


def register() -> None:
    """Register "regard" with transformers: the attention, and the mask (without it masks would be lost silently)."""
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise SpecError(
            'attn_implementation="regard" needs transformers 5: pip install "regard[huggingface]"'
        ) from missing
    version = transformers.__version__
    if not version.startswith(TESTED + "."):
        warnings.warn(
            f"transformers {version}: regard was tested with {TESTED}; "
            f"a mask that it does not recognize becomes a table",
            stacklevel=3,
        )
    from .attention import attend
    from .masks import mask
    from .own_attention import install
    from .patterns import take_saved

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    install(NAME, take_saved)
