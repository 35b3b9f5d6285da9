"""How far 16-bit weights have moved, in a byte each. Trusted: torch's integers. Faked: nothing."""

import pytest
import torch

from infinity import kernels
from kernel_cases import addresses, random_bits, shifted

SIZES = (0, 1, 15, 16, 17, 31, 33, 1000, 4099)


def words(n, seed):
    return random_bits(n, seed, torch.bfloat16).view(torch.int16)


def encoded(before, behind, most):
    codes = torch.full((max(most, 1) + 8,), 7, dtype=torch.uint8)
    nbytes = kernels.encode_moves(len(before), *addresses(before, behind), most, codes.data_ptr())
    assert codes[most:].eq(7).all() or not most, "nothing is written behind its room"
    return codes, nbytes


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("reach", [0, 127, 128, 32768])
def test_weights_of_any_bits_are_moved_to_where_they_were(n, offset, reach):
    before = words(n, n)
    moved = torch.randint(-reach, reach + 1, (n,), generator=torch.Generator().manual_seed(n))
    behind = (before.int() + moved).to(torch.int16)  # around the end of the type, too
    before, behind = shifted(before, offset), shifted(behind, offset)
    codes, nbytes = encoded(before, behind, 3 * n)
    far = ((moved + 2**15) % 2**16 - 2**15).abs() > 127
    assert nbytes == n + 2 * int(far.sum())
    found = before.clone()
    kernels.move(n, codes.data_ptr(), found.data_ptr())
    assert torch.equal(found, behind)


def test_what_needs_more_room_than_there_is_is_said_to_and_not_written():
    before = torch.zeros(100, dtype=torch.int16)
    behind = before.clone()
    behind[::10] = 1000
    assert encoded(before, behind, 120)[1] == 120
    assert encoded(before, behind, 119)[1] == 0
    assert encoded(before, behind, 99)[1] == 0
