"""Speed of the kernels: optimizer steps, split masters, checksums; beside memory bandwidth and torch."""
