"""Buffers that ranks have once: which of them, and what stays of each. Trusted: the memory itself
(ranks/shared_memory.py). Faked: ranks are threads of this process.
"""

import pytest
import torch
from torch import nn

from infinity.ranks.shared_memory import has_nameless_memory
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


def shared(make):
    """Return the bytes that two ranks share of make(), as a buffer, and what one of them has then."""

    def work(group):
        module = nn.Module()
        module.register_buffer("table", make())
        return share_buffers([("", module)], group, 20.0), module.table

    return on_ranks(2, work, kind=Rank)[0]


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
        table = nn.Buffer(torch.zeros(LEAST_NBYTES), persistent=False)
        table.mark = "rotary"
        return table

    nbytes, found = shared(make)
    assert nbytes > 0
    assert (found.mark, isinstance(found, nn.Buffer)) == ("rotary", True)
