"""Large tensors in memory of their own, and memory that they take in turn."""

import gc
from pathlib import Path

import pytest
import torch

from infinity import tiling
from infinity.tiling import mapped

CPU = torch.device("cpu")
LARGE = (1024, 512)  # 2 MiB in fp32
MIB = 1 << 18  # elements of fp32


def resident():
    """Return the bytes of this process's memory that are no file's: those the kernel may drop at any time."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_mapped_is_an_ordinary_tensor_and_goes_with_it(dtype):
    before = resident()
    one = mapped.empty((4096, 2048), dtype, CPU).fill_(1)
    assert (one.shape, one.dtype, one.is_contiguous(), one._is_view()) == ((4096, 2048), dtype, True, False)
    part = one[1:]
    del one
    assert resident() - before > part.nbytes - (1 << 20)  # a kernel counts each core's pages by themselves
    del part
    assert resident() - before < 4 << 20
    assert not mapped.zeros((4096, 2048), dtype, CPU).any()
    assert mapped.zeros((2, 0), dtype, CPU).shape == (2, 0)


def test_it_begins_where_a_huge_page_does_and_takes_no_more_than_its_bytes():
    before = resident()
    some = [mapped.empty((5 * MIB // 2,), torch.float32, CPU).fill_(1) for _ in range(32)]
    assert all(one.data_ptr() % mapped.HUGE_NBYTES == 0 for one in some)
    assert resident() - before < 32 * (some[0].nbytes + (1 << 18))


def test_a_room_lends_the_memory_of_a_tensor_that_is_gone():
    room = mapped.ReusableBuffer()
    first = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    address = first.data_ptr()
    del first
    again = room.empty((512, 2048), torch.bfloat16, CPU)  # as many bytes
    assert again.data_ptr() == address
    assert again.is_contiguous()
    assert not again._is_view()


@pytest.mark.parametrize("holder", [lambda one: one[3:], lambda one: one.detach(), lambda one: one.numpy()])
def test_a_room_lends_nothing_twice(holder):
    room = mapped.ReusableBuffer()
    first = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    held = holder(first)
    del first
    room.empty(LARGE, torch.float32, CPU).fill_(2.0)
    assert (torch.as_tensor(held) == 1.0).all()


def test_what_was_lent_outlives_its_room():
    room = mapped.ReusableBuffer()
    lent = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    room.clear()
    del room
    gc.collect()
    assert (lent == 1.0).all()


def test_another_size_is_other_memory():
    room = mapped.ReusableBuffer()
    room.empty(LARGE, torch.float32, CPU)
    larger = room.empty((2048, 512), torch.float32, CPU).fill_(1.0)
    assert larger.numel() == 2048 * 512
    assert larger.sum() == larger.numel()


def test_small_tensors_are_not_lent():
    room = mapped.ReusableBuffer()
    first, second = (room.empty((8,), torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_rooms_lend_what_has_gone_to_another_as_large():
    pool = mapped.BufferPool()
    first, second = (pool.empty(LARGE, torch.float32, CPU).fill_(value) for value in (1.0, 2.0))
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    third = pool.empty(LARGE, torch.float32, CPU).fill_(3.0)
    assert third.data_ptr() == address
    assert (second == 2.0).all()


def test_rooms_hold_an_eighth_more_than_was_lent_at_one_time():
    pool = mapped.BufferPool()
    before = resident()

    def work(numel, count):
        held = [pool.empty((numel,), torch.float32, CPU).fill_(1.0) for _ in range(count)]
        return [one.data_ptr() for one in held]

    large = work(8 * MIB, 4)  # 32 MiB
    assert resident() - before > 31 << 20
    work(2 * MIB, 2)  # within the eighth
    assert sorted(work(8 * MIB, 4)) == sorted(large)
    work(3 * MIB, 10)
    assert 29 << 20 < resident() - before < 37 << 20
    pool.clear()
    assert resident() - before < 4 << 20


def test_gradients_of_tiles_take_turns_in_memory_unless_they_are_kept():
    layer = tiling.TiledLinear(512, 4096, False, out_tiles=4)
    taken = []

    def take(parameter):
        taken.append(parameter.grad.data_ptr())
        parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(take) for one in layer.parameters()]
    torch.manual_seed(0)
    x = torch.randn(16, 512, requires_grad=True)
    layer(x).sum().backward()
    assert len(set(taken)) == 1
    for hook in hooks:
        hook.remove()
    layer(x).sum().backward()
    grads = [one.grad for one in layer.parameters()]
    assert len({one.data_ptr() for one in grads}) == 4
    expected = x.detach().sum(0).expand(1024, 512)
    assert all(torch.allclose(one, expected, atol=1e-4) for one in grads)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_tiles", [1, 2])
def test_results_of_tiles_lie_in_the_common_output_where_nothing_is_summed(bias, in_tiles):
    layer = tiling.TiledLinear(64, 512, bias, out_tiles=4, in_tiles=in_tiles)
    places = []
    for tile in layer.tiles:
        tile.register_forward_hook(lambda _, args, result: places.append(result.data_ptr()))
    out = layer(torch.randn(8, 64))
    expected = [out[:, start].data_ptr() for start in range(0, 512, 128)]
    assert (places == expected) == (in_tiles == 1)
