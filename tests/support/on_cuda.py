"""What tests on CUDA have in common."""

import contextlib
import gc

import torch


@contextlib.contextmanager
def repeatable_kernels(monkeypatch, *, fills=False):
    """Let CUDA's kernels give the same bits each time, and free what is left behind. fills: whether what
    `empty` returns is filled, by a kernel that no training has.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
    gc.collect()
    torch.cuda.empty_cache()
