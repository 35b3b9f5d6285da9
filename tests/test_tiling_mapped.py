"""Memory that tensors of one size take in turn."""

import gc

import pytest
import torch

from infinity import tiling
from infinity.tiling import mapped

CPU = torch.device("cpu")
LARGE = (1024, 512)  # 2 MiB in fp32


def test_a_room_lends_the_memory_of_a_tensor_that_is_gone():
    room = mapped.Room()
    first = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    address = first.data_ptr()
    del first
    again = room.empty((512, 2048), torch.bfloat16, CPU)  # as many bytes
    assert again.data_ptr() == address
    assert again.is_contiguous()
    assert not again._is_view()


@pytest.mark.parametrize("holder", [lambda one: one[3:], lambda one: one.detach(), lambda one: one.numpy()])
def test_a_room_lends_nothing_twice(holder):
    room = mapped.Room()
    first = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    held = holder(first)
    del first
    room.empty(LARGE, torch.float32, CPU).fill_(2.0)
    assert (torch.as_tensor(held) == 1.0).all()


def test_what_was_lent_outlives_its_room():
    room = mapped.Room()
    lent = room.empty(LARGE, torch.float32, CPU).fill_(1.0)
    room.clear()
    del room
    gc.collect()
    assert (lent == 1.0).all()


def test_another_size_is_other_memory():
    room = mapped.Room()
    room.empty(LARGE, torch.float32, CPU)
    larger = room.empty((2048, 512), torch.float32, CPU).fill_(1.0)
    assert larger.numel() == 2048 * 512
    assert larger.sum() == larger.numel()


def test_small_tensors_are_not_lent():
    room = mapped.Room()
    first, second = (room.empty((8,), torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


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
