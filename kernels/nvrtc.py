"""CUDA C that is compiled where it runs, by NVRTC, and launched through CUDA's driver. The first comes with
torch for CUDA, the second with the GPU's driver: nothing has to be installed.

torch.cuda._compile_kernel does the same, but needs a CUDA toolkit on the machine for its headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cffi

_NVRTC = """
typedef struct nvrtc *nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram *, const char *source, const char *name, int, void *, void *);
int nvrtcCompileProgram(nvrtcProgram, int n, const char *const *options);
int nvrtcGetProgramLogSize(nvrtcProgram, size_t *);
int nvrtcGetProgramLog(nvrtcProgram, char *);
int nvrtcGetCUBINSize(nvrtcProgram, size_t *);
int nvrtcGetCUBIN(nvrtcProgram, char *);
int nvrtcDestroyProgram(nvrtcProgram *);
const char *nvrtcGetErrorString(int);
"""
_DRIVER = """
int cuCtxGetCurrent(void **);
int cuCtxSetCurrent(void *);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuLaunchKernel(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned shared, void *stream, void **arguments, void **);
int cuGetErrorString(int, const char **);
"""
_THREADS = 256
_BLOCKS = 1 << 16
"""At most, of one launch: a thread takes every so many-th element then."""


class CudaKernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


class CudaKernel:
    """One function of CUDA C, for the device and the context that are current when it is made."""

    def __init__(self, source: str, name: str, architecture: str, libraries: Sequence[str]) -> None:
        """Compile `source` for an architecture such as "sm_90", and load its function `name`. libraries: the
        names or paths under which NVRTC is looked for, in order.

        Raises: CudaKernelError, with the compiler's words where it refused.
        """
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DRIVER)
        self._driver = _open(self._ffi, ["libcuda.so.1"])
        image = compiled(source, name, architecture, libraries)
        module, function, context = (self._ffi.new("void **") for _ in range(3))
        self._check("cuCtxGetCurrent", self._driver.cuCtxGetCurrent(context))
        self._check("cuModuleLoadData", self._driver.cuModuleLoadData(module, image))
        found = self._driver.cuModuleGetFunction(function, module[0], name.encode())
        self._check("cuModuleGetFunction", found)
        self._function, self._context = function[0], context[0]

    def launch(self, n: int, stream: int, arguments: Sequence[Any]) -> None:
        """Queue the kernel over `n` elements, at least one, on a stream of its device, given by its handle,
        whatever device is the current one. arguments: pointers to the
        values of the function's parameters, as cffi's cdata.

        Raises: CudaKernelError.
        """
        pointers = self._ffi.new("void *[]", [self._ffi.cast("void *", one) for one in arguments])
        blocks = min(-(-n // _THREADS), _BLOCKS)
        shape = (blocks, 1, 1, _THREADS, 1, 1, 0)
        null, on = self._ffi.NULL, self._ffi.cast("void *", stream)
        context = self._ffi.new("void **")
        self._check("cuCtxGetCurrent", self._driver.cuCtxGetCurrent(context))
        before = context[0]
        try:
            if before != self._context:  # that of another device, or none in a thread that has not used any
                self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))
            launched = self._driver.cuLaunchKernel(self._function, *shape, on, pointers, null)
        finally:
            if before not in (self._context, null):
                self._driver.cuCtxSetCurrent(before)
        self._check("cuLaunchKernel", launched)

    def _check(self, call: str, code: int) -> None:
        if code:
            text = self._ffi.new("const char **")
            self._driver.cuGetErrorString(code, text)
            said = self._ffi.string(text[0]).decode() if text[0] != self._ffi.NULL else "unknown"
            raise CudaKernelError(f"{call}: {said} ({code})")


def compiled(source: str, name: str, architecture: str, libraries: Sequence[str]) -> bytes:
    """Compile CUDA C to a cubin; see CudaKernel."""
    ffi = cffi.FFI()
    ffi.cdef(_NVRTC)
    nvrtc = _open(ffi, libraries)

    def check(call: str, code: int, said: str = "") -> None:
        if code:
            reason = ffi.string(nvrtc.nvrtcGetErrorString(code)).decode()
            raise CudaKernelError(f"{call}: {reason} ({code})\n{said}".strip())

    program, size = ffi.new("nvrtcProgram *"), ffi.new("size_t *")
    text = (source.encode(), f"{name}.cu".encode())
    check("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(program, *text, 0, ffi.NULL, ffi.NULL))
    try:
        option = ffi.new("char[]", f"--gpu-architecture={architecture}".encode())
        code = nvrtc.nvrtcCompileProgram(program[0], 1, ffi.new("const char *[]", [option]))
        check("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program[0], size))
        log = ffi.new("char[]", max(1, size[0]))
        check("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program[0], log))
        check("nvrtcCompileProgram", code, ffi.string(log).decode(errors="replace"))
        check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program[0], size))
        image = ffi.new("char[]", size[0])
        check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program[0], image))
        return bytes(ffi.buffer(image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def places(cuda: str, torch_folder: Path) -> list[str]:
    """Return where NVRTC of a CUDA version such as "13.0" may be, given torch's folder: loaded already or
    known to the system, else among the packages beside torch.
    """
    name = f"libnvrtc.so.{cuda.split('.', maxsplit=1)[0]}"
    folders = [torch_folder / "lib", *sorted(torch_folder.parent.glob("nvidia/*/lib"))]
    return [name, *(str(folder / name) for folder in folders if (folder / name).exists())]


def _open(ffi: Any, libraries: Sequence[str]) -> Any:
    reasons = []
    for one in libraries:
        try:
            return ffi.dlopen(one)
        except OSError as error:
            reasons.append(str(error))
    raise CudaKernelError(f"none of {', '.join(libraries)} can be opened: {'; '.join(reasons)}")
