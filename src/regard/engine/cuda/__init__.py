"""CUDA: Triton kernels that walk the blocks of a plan, forward and backward.

Triton is imported here and nowhere else; whoever wants these kernels imports this package when it runs them.
"""

from .added import Added
from .again import Again
from .launch import attend, backward, forward, task

__all__ = ["Added", "Again", "attend", "backward", "forward", "task"]
