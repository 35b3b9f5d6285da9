"""Instruction sets to try, and what tests set put back."""

import pytest

from infinity import kernels
from kernel_cases import ISAS, supported


@pytest.fixture(autouse=True)
def settings_are_put_back():
    isa, threads = kernels.isa(), kernels.threads()
    yield
    kernels.set_isa(isa)
    kernels.set_threads(threads)


@pytest.fixture(params=ISAS)
def isa(request):
    if not supported(request.param):
        pytest.skip(f"this machine has no {request.param}")
    kernels.set_isa(request.param)
    return request.param
