"""Embeddings over micro-batches. Trusted: torch's dense gradient of each micro-batch, added up in fp32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allocations import Allocations
from covers import examples
from infinity.tiling import tile_batch_, untile_

pytestmark = pytest.mark.usefixtures("repeatable")


def cut(embedding, micro_batch):
    model = nn.Sequential(embedding, nn.Linear(embedding.embedding_dim, 2, dtype=embedding.weight.dtype))
    assert "0" in tile_batch_(model, micro_batch, blocks=nn.Linear)
    return model


@settings(max_examples=examples(15, 40), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 12),
    samples=st.integers(1, 7),
    micro_batch=st.integers(1, 4),
    padding=st.booleans(),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_gradient_is_the_sum_of_the_micro_batches_rounded_once(
    seed, rows, samples, micro_batch, padding, by_frequency, dtype
):
    torch.manual_seed(seed)
    plain = nn.Embedding(rows, 5, rows - 1 if padding else None, scale_grad_by_freq=by_frequency, dtype=dtype)
    ids = torch.randint(rows, (samples, 3))
    grad = torch.randn(samples, 3, 5).to(dtype)
    total = torch.zeros(rows, 5)
    for part, of_part in zip(ids.split(micro_batch), grad.split(micro_batch), strict=True):
        plain.zero_grad()
        plain(part).backward(of_part)
        total += plain.weight.grad.float()
    plain.zero_grad()
    expected = plain(ids)
    cut(plain, micro_batch)
    assert torch.equal(plain(ids), expected)
    plain(ids).backward(grad)
    assert plain.weight.grad.dtype == dtype
    assert torch.equal(plain.weight.grad, total.to(dtype))


def test_no_samples_give_a_gradient_of_zeros():
    embedding = nn.Embedding(4, 3)
    cut(embedding, 2)
    embedding(torch.empty(0, 5, dtype=torch.long)).sum().backward()
    assert torch.equal(embedding.weight.grad, torch.zeros(4, 3))


def test_memory_is_that_of_the_gradient_and_of_the_rows_in_use():
    embedding = nn.Embedding(10_000, 8, dtype=torch.bfloat16)
    cut(embedding, 1)
    with Allocations() as counted:
        embedding(torch.arange(64).view(8, 8)).sum().backward()
    assert embedding.weight.nbytes <= counted.peak_nbytes <= embedding.weight.nbytes * 1.1


def test_an_embedding_that_changes_its_rows_is_cut_as_any_module():
    embedding = nn.Embedding(6, 3, max_norm=1.0)
    cut(embedding, 1)
    embedding(torch.arange(6).view(2, 3)).sum().backward()
    assert torch.equal(embedding.weight.grad, torch.ones(6, 3))
    assert embedding.weight.norm(dim=1).max() < 1.01


def test_a_forward_that_somebody_replaced_is_called():
    embedding = nn.Embedding(6, 3)
    ids, whole = torch.arange(6).view(2, 3), embedding.forward
    embedding.forward = lambda ids: 10 * whole(ids)
    cut(embedding, 1)
    assert torch.equal(embedding(ids), 10 * whole(ids))
    embedding(ids).sum().backward()
    assert torch.equal(embedding.weight.grad, torch.full((6, 3), 10.0))


def test_a_sparse_gradient_is_refused_by_name():
    with pytest.raises(ValueError, match="has an embedding with sparse gradients"):
        cut(nn.Embedding(6, 3, sparse=True), 1)


def test_cutting_again_changes_the_number_and_untile_undoes_it():
    embedding = nn.Embedding(6, 3)
    model = cut(embedding, 2)
    tile_batch_(model, 3, blocks=nn.Linear)
    assert embedding.forward.micro_batch == 3
    untile_(model)
    assert "forward" not in vars(embedding)
