"""The kernels in Gluon for Hopper GPUs (compute capability 9.0): each program streams blocks of many tiles."""
