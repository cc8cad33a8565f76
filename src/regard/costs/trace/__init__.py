"""Running real modules on meta tensors, as if on a device: FLOPs, pairs, and every storage that is allocated.

tracer.py    the dispatch mode: counts operations, follows small values, meters storages
device.py    meta tensors that say they are on the CPU or a GPU, and what runs differently there
autocast.py  autocast as that device has it
attention.py fused attention: which kernel of PyTorch runs, what it saves and needs
kernels.py   the hidden workspace of operations, by device
meter.py     when each storage is allocated and freed, by module and phase
"""
