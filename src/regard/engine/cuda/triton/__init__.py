"""The kernels in Triton, for any GPU that Triton supports."""
