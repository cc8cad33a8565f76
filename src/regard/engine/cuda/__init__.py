"""CUDA: Triton kernels that walk the blocks of a plan, forward and backward.

Triton is imported here and nowhere else; whoever wants these kernels imports this package when it runs them.
"""

from .again import Again
from .host import attend, backward, forward, task
from .triton.bias_and_dropout import Added

__all__ = ["Added", "Again", "attend", "backward", "forward", "task"]
