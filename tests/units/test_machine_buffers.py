"""Buffers that ranks have once: which of them, and what stays of each. Trusted: the memory itself
(ranks/shared_memory.py). Faked: ranks are threads of this process.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.ranks.shared_memory import PAGE, has_nameless_memory
from infinity.units.machine_buffers import LEAST_NBYTES, share_buffers
from machine_ranks import MachineRank
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not has_nameless_memory(), reason="this system has none")


class Rank(MachineRank):
    """A rank that compares."""

    def same(self, number, _what):
        return len(set(self._all(number))) == 1

    def of_all(self, numbers, _what):
        return self._all(list(numbers))

    def agree(self, _what):
        self._all(None)


def of_both(make, *, persistent=True, saved=True):
    """Return the bytes that two ranks share of make(), as a buffer, and what each of them has then."""

    def work(group):
        module = nn.Module()
        module.register_buffer("table", make(), persistent=persistent)
        return share_buffers([("", module)], group, 20.0, saved=saved), module.table

    (nbytes, one), (same, other) = on_ranks(2, work, kind=Rank)
    assert nbytes == same
    return nbytes, (one, other)


def shared(make):
    """Return those bytes, and what one of them has then."""
    nbytes, (one, _) = of_both(make)
    return nbytes, one


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex64])
def test_buffers_of_any_elements_are_the_same(dtype):
    def make():
        return (torch.arange(LEAST_NBYTES) % 2).to(dtype)

    nbytes, found = shared(make)
    assert nbytes == make().nbytes
    assert torch.equal(found.view(torch.uint8), make().view(torch.uint8))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("kind", ["conjugate", "negative", "quantized"])
def test_a_buffer_of_which_bytes_are_not_all_stays_as_it_is(kind):
    def make():
        numbers = torch.arange(LEAST_NBYTES, dtype=torch.float32)
        if kind == "quantized":
            return torch.quantize_per_tensor(numbers, 0.5, 3, torch.qint8)
        return torch._neg_view(numbers) if kind == "negative" else torch.complex(numbers, numbers).conj()

    nbytes, found = shared(make)
    assert nbytes == 0
    assert (found.is_conj(), found.is_neg(), found.is_quantized) == (
        kind == "conjugate",
        kind == "negative",
        kind == "quantized",
    )


def test_what_a_program_has_marked_a_buffer_with_stays():
    def make():
        table = nn.Buffer(torch.ones(LEAST_NBYTES), persistent=False)
        table.mark = "rotary"
        return table

    nbytes, found = shared(make)
    assert nbytes > 0
    assert (found.mark, isinstance(found, nn.Buffer)) == ("rotary", True)


def test_a_buffer_of_zeros_stays_as_it_is():
    nbytes, found = shared(lambda: torch.zeros(LEAST_NBYTES))
    assert nbytes == 0
    assert found.untyped_storage().resizable(), "the one that the program has made"


MIB = 1 << 20


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("numbers", [slice(13 * MIB, 14 * MIB), slice(7, 8), slice(20 * MIB - 9, None)])
def test_where_a_buffer_is_zero_for_long_it_takes_no_memory_until_it_is_written_to(numbers):
    def make():
        table = torch.zeros(20 * MIB + 5, dtype=torch.uint8)
        table[numbers] = 3
        return table

    expected, nbytes, (found, other) = make(), *of_both(make)
    assert 0 < nbytes < 2 * MIB
    before = resident_nbytes()
    assert all(not one[MIB : 12 * MIB].view(torch.int64).any() for one in (found, other))
    assert resident_nbytes() - before < 5 * MIB, "where all of it would take 22 MiB on the two"
    assert torch.equal(found, expected)
    found[2 * MIB] = 5
    expected[2 * MIB] = 5
    assert torch.equal(found, expected)
    assert other[2 * MIB] == 0


def test_buffers_that_are_saved_are_shared_where_that_is_asked_for():
    def make():
        return torch.ones(LEAST_NBYTES)

    for saved, persistent in ((True, True), (True, False), (False, False)):
        assert of_both(make, persistent=persistent, saved=saved)[0] == make().nbytes
    assert of_both(make, persistent=True, saved=False)[0] == 0
