"""Extents of bytes, on NVMe and in host memory."""
