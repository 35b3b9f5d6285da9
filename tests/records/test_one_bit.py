"""What workers of 1-bit Adam send of a parameter. Trusted: infinity.reference.one_bit, plain torch."""

import numpy as np
import pytest
import torch

from infinity.records import one_bit
from infinity.reference import one_bit as reference


def drawn(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [1, 7, 255, 256, 257, 1000, 2048])
def test_what_comes_of_signs_and_scales_is_the_references_and_errors_are_kept(numel):
    share, start = 4096, 2048
    memory = np.zeros(one_bit.row_nbytes([share]), np.uint8)
    state, expected = [(drawn(numel, 1), torch.zeros(numel)) for _ in range(2)]
    for step in range(3):
        g = drawn(numel, 2 + step)
        g[::5] = 0
        one_bit.send(memory, share, start, state, g, 0.9)
        sent = reference.send(*expected, g, 0.9)
        assert torch.equal(one_bit.decode(memory, share, start, numel), sent)
    for ours, its in zip(state, expected, strict=True):
        assert torch.equal(ours, its)
    assert numel == 1 or not expected[1].eq(0).all()


def test_what_was_not_sent_at_once_is_sent_in_time():
    w, e, sent = torch.zeros(512), torch.zeros(512), torch.zeros(512)
    g = drawn(512)
    for _ in range(400):
        sent += reference.send(w, e, g, 0.0)
    assert torch.allclose(sent + e, 400 * g, rtol=1e-4)
    assert (sent / 400 - g).abs().median() < 0.02


def test_a_share_takes_a_bit_an_element_and_a_scale_for_each_256():
    assert one_bit.row_nbytes([4096, 512]) == (4096 + 512) // 8 + 4 * (16 + 2)
    assert one_bit.row_nbytes([1 << 20]) <= (2 << 20) / 14


def test_an_infinity_is_seen_by_all_of_its_block():
    memory = np.zeros(one_bit.row_nbytes([2048]), np.uint8)
    g = torch.ones(600)
    g[300] = float("inf")
    one_bit.send(memory, 2048, 0, (torch.zeros(600), torch.zeros(600)), g, 0.9)
    finite = one_bit.decode(memory, 2048, 0, 600).isfinite()
    assert finite[:256].all()
    assert not finite[256:512].any()
    assert finite[512:].all()
