"""CUDA: Triton kernels that visit the blocks of a plan, forward and backward.

backend.py      the backend `triton`: what it refuses, estimates and prepares
host.py         from tensors to launches, with their gradients; repeated calls
call.py         what a call computes, the layout of its tensors, tile sizes
launches.py     which kernels run a call, and their arguments
prepared.py     launches, programs of launches, and the one cache that holds them
schedule.py     the passes of a plan as tables that kernels read; work_split.py assigns them to programs
documents.py    packed documents: their tables for the Hopper kernels, and which calls have them
tile_lists.py   tiles and blocks as lists of members (short calls, grids), and passes with the masks of their blocks
mask.py         which pairs are allowed: a pattern as a Triton function, simpler patterns, the bits of a block
triton/         the general kernels; hopper/ those for Hopper GPUs, and their launches

Only prepared.py, launches.py, host.py and the kernels import Triton; the others import those when a call first runs.
"""
