"""The lessons by number."""

from .baselines import reversing
from .depth import gradient_flow
from .images import learned_offsets, vision_transformer
from .language import agreement, phrase_book
from .masks import entropy_rate, future_leak, padding
from .order import bag_of_tokens, extrapolation, word_order
from .scaling import score_scaling

LESSONS = {
    "T1": padding,
    "T2": entropy_rate,
    "T3": phrase_book,
    "T4": learned_offsets,
    "T5": word_order,
    "T6": vision_transformer,
    "T7": gradient_flow,
    "T8": reversing,
    "T9": future_leak,
    "T10": extrapolation,
    "T11": bag_of_tokens,
    "T12": score_scaling,
    "T13": agreement,
}
