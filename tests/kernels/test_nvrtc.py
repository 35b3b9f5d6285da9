"""Compiling CUDA C where NVRTC is not, where it is looked for, and launching (on a GPU:
units/test_fused_updates.py). Faked where a kernel is launched: NVRTC, and a driver that knows one context of
a thread.
"""

import os
import shlex
import subprocess

import cffi
import pytest

from infinity.kernels import nvrtc
from infinity.kernels.nvrtc import CudaKernel, CudaKernelError, compiled, places

FAKE = """
#include <stddef.h>
void *current;
void *launched_in, *launched_on;
int launches, refuses;
int nvrtcCreateProgram(void *p, const char *s, const char *n, int c, void *a, void *b) { return 0; }
int nvrtcCompileProgram(void *p, int n, const char *const *options) { return 0; }
int nvrtcGetProgramLogSize(void *p, size_t *size) { *size = 1; return 0; }
int nvrtcGetProgramLog(void *p, char *log) { *log = 0; return 0; }
int nvrtcGetCUBINSize(void *p, size_t *size) { *size = 1; return 0; }
int nvrtcGetCUBIN(void *p, char *cubin) { *cubin = 0; return 0; }
int nvrtcDestroyProgram(void *p) { return 0; }
const char *nvrtcGetErrorString(int code) { return "?"; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = current; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    launched_in = current, launched_on = stream, launches++;
    return refuses || function != current ? 400 : 0;
}
int cuGetErrorString(int code, const char **text) { *text = "invalid resource handle"; return 0; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver whose current context is number 1."""
    (tmp_path / "fake.c").write_text(FAKE)
    library = str(tmp_path / "fake.so")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run([*compiler, "-shared", "-fPIC", str(tmp_path / "fake.c"), "-o", library], check=True)
    monkeypatch.setattr(nvrtc, "_open", lambda ffi, _: ffi.dlopen(library))
    ffi = cffi.FFI()
    ffi.cdef("extern void *current, *launched_in, *launched_on; extern int launches, refuses;")
    fake = ffi.dlopen(library)
    fake.current = ffi.cast("void *", 1)
    return fake


def number(pointer):
    return int(cffi.FFI().cast("uintptr_t", pointer))


@pytest.mark.parametrize(("current", "afterwards"), [(1, 1), (2, 2), (0, 1)])
@pytest.mark.parametrize("refuses", [0, 1])
def test_a_kernel_is_launched_in_its_own_context_and_the_threads_is_put_back(
    driver, current, afterwards, refuses
):
    kernel = CudaKernel("", "nothing", "sm_90", ["libnvrtc.so.13"])
    driver.current, driver.refuses = cffi.FFI().cast("void *", current), refuses
    if refuses:
        with pytest.raises(CudaKernelError, match=r"cuLaunchKernel: invalid resource handle \(400\)"):
            kernel.launch(1000, 7, [])
    else:
        kernel.launch(1000, 7, [])
    assert (driver.launches, number(driver.launched_in), number(driver.launched_on)) == (1, 1, 7)
    assert number(driver.current) == afterwards


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
