"""Compiling CUDA C where NVRTC is not, and where it is looked for (on a GPU: units/test_fused_updates.py)."""

import pytest

from infinity.kernels.nvrtc import CudaKernelError, compiled, places


def test_where_no_nvrtc_can_be_opened_each_place_is_named():
    with pytest.raises(
        CudaKernelError, match=r"none of libnvrtc\.so\.0, /nowhere/libnvrtc\.so\.0 can be opened"
    ):
        compiled("", "nothing", "sm_90", ["libnvrtc.so.0", "/nowhere/libnvrtc.so.0"])


def test_nvrtc_is_looked_for_by_its_name_and_then_beside_torch(tmp_path):
    library = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "nvidia/cuda_nvrtc/lib").mkdir(parents=True)
    assert places("13.0", tmp_path / "torch") == ["libnvrtc.so.13", str(library)]
    assert places("12.8", tmp_path / "torch") == ["libnvrtc.so.12"]
