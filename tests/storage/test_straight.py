"""Which bytes of a file go straight to their place. Nothing is faked."""

import random

import pytest

from infinity.sizes import BLOCK
from infinity.storage.straight import straight_range

PAGE = 1000 * BLOCK


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_whole_blocks_are_read_where_memory_begins_as_far_behind_a_block_as_the_bytes_do(before, behind):
    choices = random.Random(5)
    for _ in range(300):
        offset, nbytes = choices.randrange(9 * BLOCK), choices.randrange(1, 9 * BLOCK)
        file_nbytes = offset + nbytes + choices.choice([0, 1, BLOCK, 5 * BLOCK])
        found = straight_range(
            offset, nbytes, PAGE + offset % BLOCK, file_nbytes, before=before, behind=behind
        )
        if found is None:
            assert nbytes < (3 - before - behind) * BLOCK
            continue
        assert found.start % BLOCK == found.stop % BLOCK == 0
        assert found.stop <= file_nbytes
        assert abs(found.start - offset) < BLOCK
        assert abs(offset + nbytes - found.stop) < BLOCK
        assert before or found.start >= offset
        assert behind or found.stop <= offset + nbytes


def test_what_lies_otherwise_in_its_block_than_in_memory_is_not_read_straight():
    assert straight_range(8, 9 * BLOCK, PAGE, 10 * BLOCK, before=True, behind=True) is None
    assert straight_range(8, 9 * BLOCK, PAGE + 8, 10 * BLOCK, before=True, behind=True) == range(10 * BLOCK)
