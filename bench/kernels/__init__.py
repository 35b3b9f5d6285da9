"""The kernels: the optimizer step, the split master, checksums, beside the memory's speed and torch's."""
