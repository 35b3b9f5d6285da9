"""Products of bf16 matrices, added to fp32 sums or rounded, by the kernels. Trusted: fp64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity import kernels
from infinity.kernels import Rows, UnsupportedIsaError

SIDES = st.integers(0, 70)
ROWS = st.one_of(SIDES, st.sampled_from([511, 512, 513, 1030]))

needs_instructions = pytest.mark.skipif(
    not kernels.multiplies_bf16(), reason="this machine has no AVX512-BF16"
)


def matrix(rows, columns, gap, dtype=torch.bfloat16):
    """Random values whose rows lie `gap` elements apart, and what they lie in."""
    whole = torch.randn(rows, columns + gap).to(dtype)
    return whole[:, :columns], whole


def turned(rows, columns, gap):
    """The same with columns that lie so."""
    return matrix(columns, rows, gap)[0].t()


def run(kernel, left, right, out, threads=2):
    k, m = left.shape
    rows = [Rows(one.data_ptr(), *one.stride()) for one in (left, right, out)]
    kernel(k, m, right.shape[1], *rows, n_threads=threads)


def add(left, right, total, threads=2):
    run(kernels.add_product_bf16, left, right, total, threads)


@needs_instructions
@given(k=ROWS, m=SIDES, n=SIDES, gap=st.integers(0, 40), in_columns=st.booleans())
def test_a_product_is_added_and_nothing_beside_it_touched(k, m, n, gap, in_columns):
    left, right = turned(k, m, gap) if in_columns else matrix(k, m, gap)[0], matrix(k, n, gap)[0]
    total, whole = matrix(m, n, gap, torch.float32)
    before = whole.clone()
    add(left, right, total)
    exact = before[:, :n].double() + left.double().t() @ right.double()
    scale = before[:, :n].double().abs() + left.double().abs().t() @ right.double().abs()
    assert ((total.double() - exact).abs() <= scale * 2**-22 * max(1, k) ** 0.5).all()
    assert torch.equal(whole[:, n:], before[:, n:])


@needs_instructions
@given(k=st.integers(1, 512), m=SIDES, n=SIDES, gap=st.integers(0, 40), in_columns=st.booleans())
def test_a_product_is_rounded_and_nothing_beside_it_touched(k, m, n, gap, in_columns):
    left, right = turned(k, m, gap) if in_columns else matrix(k, m, gap)[0], matrix(k, n, gap)[0]
    result, whole = matrix(m, n, gap)
    before = whole.clone()
    run(kernels.product_bf16, left, right, result)
    exact = left.double().t() @ right.double()
    scale = left.double().abs().t() @ right.double().abs()
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + scale * 2**-22 * k**0.5).all()
    assert torch.equal(whole[:, n:], before[:, n:])


@needs_instructions
def test_it_is_rounded_to_the_nearest_ties_to_even_and_keeps_what_is_no_number():
    left = torch.tensor([[1.0, 1.0, -1.0, 1.0, 1.0, 0.0]]).bfloat16()
    above, tie = 2**-8 + 2**-15, 2**-8
    right = torch.tensor([[1.0], [1.0]]).bfloat16()
    for more, expected in ((above, 1 + 2**-7), (tie, 1.0), (torch.inf, torch.inf), (torch.nan, torch.nan)):
        first = torch.cat([left, torch.full_like(left, more)])
        result = torch.empty(6, 1, dtype=torch.bfloat16)
        run(kernels.product_bf16, first, right, result)
        fifth = torch.tensor(expected).bfloat16()
        assert torch.equal(result[4].isnan(), fifth.isnan()[None])
        assert torch.isnan(fifth) or result[4] == fifth
        exact = (first.double().t() @ right.double()).bfloat16()
        assert torch.equal(result.nan_to_num(7.0), exact.nan_to_num(7.0))


@needs_instructions
def test_many_columns_and_any_number_of_threads_give_the_same_bits():
    left, right = torch.randn(700, 300).bfloat16(), torch.randn(700, 2100).bfloat16()
    found = []
    for threads in (1, 2, 3, 8):
        found.append(torch.ones(300, 2100))
        add(left, right, found[-1], threads)
        add(left.t().contiguous().t(), right, turning := torch.ones(300, 2100), threads)
        assert torch.equal(turning, found[-1]), "however the left factor lies"
    assert all(torch.equal(found[0], one) for one in found[1:])
    exact = 1 + left.double().t() @ right.double()
    assert (found[0] - exact).abs().max() < 1e-3


WITHOUT_OPENMP = """
import sys
import types
import numpy as np
sys.modules["infinity"] = types.ModuleType("infinity")  # the kernels alone: no torch, and so no OpenMP
sys.modules["infinity"].__path__ = [sys.argv[1]]
from infinity import kernels
from infinity.kernels import Rows
assert "torch" not in sys.modules and "libgomp" not in open("/proc/self/maps").read()
kernels.set_threads(3)
left = np.random.default_rng(0).integers(-8, 8, (130, 200)).astype(np.float32)
right = np.random.default_rng(1).integers(-8, 8, (130, 90)).astype(np.float32)
total = np.ones((200, 90), np.float32)
bf16 = [(one.view(np.uint32) >> 16).astype(np.uint16) for one in (left, right)]
rows = [Rows(one.ctypes.data, one.shape[1]) for one in (*bf16, total)]
kernels.add_product_bf16(130, 200, 90, *rows, n_threads=3)
assert np.array_equal(total, 1 + left.T @ right)
"""


@needs_instructions
def test_without_openmp_the_pool_does_it():
    command = [sys.executable, "-c", WITHOUT_OPENMP, str(Path(infinity.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_instructions_it_is_refused_by_name():
    kernels.set_isa("scalar")
    assert not kernels.multiplies_bf16()
    some = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedIsaError, match=r"AVX512-BF16, and avx512; in use: scalar"):
        add(some, some, torch.ones(2, 2))
    with pytest.raises(UnsupportedIsaError, match=r"AVX512-BF16"):
        run(kernels.product_bf16, some, some, torch.ones_like(some))


@pytest.mark.parametrize("kernel", [kernels.add_product_bf16, kernels.product_bf16])
def test_what_lies_otherwise_and_too_many_rows_are_refused(kernel):
    with pytest.raises(ValueError, match="left=0"):
        kernel(1, 1, 1, Rows(0, 1), Rows(1, 1), Rows(1, 1), n_threads=1)
    for rows in ([(1, 2, 2), (1, 1), (1, 1)], [(1, 1), (1, 1, 2), (1, 1)], [(1, 1), (1, 1), (1, 1, 2)]):
        with pytest.raises(ValueError, match=r"expected steps of 1 .left: step or stride of 1"):
            kernel(1, 1, 1, *(Rows(*one) for one in rows), n_threads=1)
    with pytest.raises(ValueError, match=r"k=513: expected 1 to 512"):
        kernels.product_bf16(513, 1, 1, *(Rows(1, 1) for _ in range(3)), n_threads=1)
