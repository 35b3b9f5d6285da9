"""Models whose sequences are in parts over ranks, against the same model with whole sequences.

The ranks are threads that hand each other tensors; gloo's are in test_ranks.py. transformers' models are
real.
"""

import threading
import types

import numpy as np
import pytest
import torch
import transformers

import infinity
import sequence_models
from allocations import Allocations
from covers import matrix
from infinity import tiling
from infinity.engine import sequences
from infinity.engine.engine import engine_of_model
from infinity.sequences.loader import SequenceParallelLoader
from infinity.sequences.parallel import SequenceParallel
from thread_ranks import on_ranks

STYLES = ("labels", "packed", "padded")
HOW = ("plain", "checkpointed", "in slices", "own split")


BUILDING = threading.Lock()
"""Threads share one generator."""


def built(name, **more):
    with BUILDING:
        torch.manual_seed(0)
        return sequence_models.model_of(name, **more).train()


def prepared(model, how):
    """Change a model as users do. how: one of HOW."""
    if how == "checkpointed":
        model.gradient_checkpointing_enable()
    if how == "in slices":
        for block in model.model.layers:
            tiling.tile_sequence(block.mlp, tiles=2)
        tiling.tile_loss_(model)


def divided(group, model, **options):
    return SequenceParallel(model, group, (0, 1), options.get("attention"))


def by_hand(batch, group):
    """Cut a batch without the library: the model shifts the labels over the ranks."""
    tokens = batch["input_ids"].shape[1] // group.size
    return {name: one[:, group.rank * tokens :][:, :tokens].contiguous() for name, one in batch.items()}


@pytest.mark.parametrize(
    *matrix(
        name=tuple(sequence_models.MODELS),
        size=(2, 4),
        style=STYLES,
        how=HOW,
        possible=lambda name, style, how, **_: (
            not (name == "gpt-oss" and style == "packed")  # its one-rank form does not look for documents
            and not (
                how == "in slices" and name in {"mixtral", "gpt-oss"}
            )  # their experts are no MLPs of torch
        ),
    )
)
def test_ranks_with_parts_of_a_sequence_have_the_loss_and_the_gradients_of_one_with_all(
    name, size, style, how
):
    batch = sequence_models.batch_of(0, style=style)
    whole = built(name)
    loss = whole(**batch, use_cache=False).loss  # with a cache, transformers looks for no documents
    loss.backward()

    def work(group):
        model = built(name)
        sequences = divided(group, model)
        prepared(model, how)
        part = by_hand(batch, group) if how == "own split" else sequences.split(batch)
        found = model(**part).loss
        found.backward()
        return found.item(), [one.grad for one in model.parameters()]

    answers = on_ranks(size, work)
    assert {one for one, _ in answers} == {answers[0][0]}, "every rank sees the mean over the sequence"
    assert answers[0][0] == pytest.approx(loss.item(), rel=1e-5)
    for place, (key, parameter) in enumerate(whole.named_parameters()):
        mean = sum(gradients[place] for _, gradients in answers) / size
        torch.testing.assert_close(
            mean, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda said, key=key: key + said
        )


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_part_of_the_activations_and_exchanges_bytes_by_formula(size):
    def kept(model, batch):
        """Return the bytes that autograd saves, each storage once, without the weights."""
        weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        found = {}

        def save(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
            loss = model(**batch).loss
        loss.backward()
        return sum(nbytes for nbytes, _ in found.values())

    batch = sequence_models.batch_of(0, rows=1, length=512)
    sizes = {"vocab_size": 64, "intermediate_size": 128}
    alone = kept(built("llama", **sizes), batch)

    def work(group):
        model = built("llama", **sizes)
        sequences = divided(group, model)
        nbytes = kept(model, sequences.split(batch))
        return nbytes, sequences.exchanged_nbytes

    heads, width, layers = 8, 4, 2
    formula = 2 * layers * (512 // size) * width * (2 * heads + 2 * heads) * 4
    for nbytes, exchanged in on_ranks(size, work):
        assert nbytes == pytest.approx(alone / size, rel=0.05)
        assert exchanged == formula


@pytest.mark.slow
def test_a_sequence_four_times_as_long_takes_on_four_ranks_the_peak_of_one():
    sizes = {"vocab_size": 256, "intermediate_size": 128}

    def peak(model, batch):
        with Allocations() as memory:
            model(**batch).loss.backward()
        return memory.peak_nbytes

    alone = peak(built("llama", **sizes), sequence_models.batch_of(0, rows=1, length=512))

    def work(group):
        model = built("llama", **sizes)
        part = divided(group, model).split(sequence_models.batch_of(0, rows=1, length=2048))
        return peak(model, part)

    assert on_ranks(4, work) == [pytest.approx(alone, rel=0.1)] * 4


def test_a_loss_of_ones_own_is_the_mean_over_the_sequence():
    batch = sequence_models.batch_of(0)
    whole = built("llama")
    expected = whole(input_ids=batch["input_ids"]).logits.square().sum(-1).mean()
    expected.backward()

    def work(group):
        model = built("llama")
        sequences = divided(group, model)
        part = sequences.split({"input_ids": batch["input_ids"]})
        own = model(**part).logits.square().sum(-1)
        loss = sequences.mean(own.sum(), own.numel())
        loss.backward()
        return loss.item(), model.lm_head.weight.grad

    answers = on_ranks(2, work)
    assert answers[0][0] == pytest.approx(expected.item(), rel=1e-5)
    mean = (answers[0][1] + answers[1][1]) / 2
    torch.testing.assert_close(mean, whole.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def test_numbers_of_items_are_added_over_the_ranks_as_the_trainer_counts_them():
    batch = sequence_models.batch_of(0)
    expected = built("llama")(**batch, num_items_in_batch=40).loss.item()

    def work(group):
        model = built("llama")
        part = divided(group, model).split(batch)
        return model(**part, num_items_in_batch=torch.tensor(20)).loss.item()

    assert on_ranks(2, work) == [pytest.approx(expected, rel=1e-5)] * 2


def test_a_part_without_labels_adds_nothing():
    batch = sequence_models.batch_of(0)
    batch["labels"][:, 7:] = -100
    expected = built("llama")(**batch).loss.item()

    def work(group):
        model = built("llama")
        sequences = divided(group, model)
        tiling.tile_loss_(model)
        loss = model(**sequences.split(batch)).loss
        loss.backward()
        return loss.item()

    assert on_ranks(2, work) == [pytest.approx(expected, rel=1e-5)] * 2


def test_whole_lets_each_rank_generate_by_itself():
    ids = sequence_models.batch_of(0, rows=1, length=6)["input_ids"]
    expected = built("llama").generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)

    def work(group):
        model = built("llama")
        sequences = divided(group, model)
        with sequences.whole():
            text = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model(**sequences.split({"input_ids": ids}))
        return text

    assert all(torch.equal(one, expected) for one in on_ranks(2, work))


class Loader:
    """Batches by number, with a state."""

    def __init__(self, first):
        self.first, self.place = first, 0

    def __len__(self):
        return 2

    def __iter__(self):
        while self.place < len(self):
            self.place += 1
            yield sequence_models.batch_of(self.first + self.place)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize(
    ("batches", "own", "numbers"), [("same", 0, [1, 2]), ("in turn", 10, [1, 11, 2, 12])]
)
def test_the_loader_gives_each_rank_its_part_and_goes_on_where_it_was(batches, own, numbers):
    def work(group):
        sequences = divided(group, built("llama"))
        parts, states = [], []
        loader = SequenceParallelLoader(Loader(own * group.rank), sequences, batches=batches)
        for part in loader:
            parts.append(part)
            states.append(loader.state_dict())
        again = SequenceParallelLoader(Loader(own * group.rank), sequences, batches=batches)
        again.load_state_dict(states[0])
        return parts, list(again), len(loader)

    for rank, (parts, again, length) in enumerate(on_ranks(2, work)):
        assert length == len(parts) == len(numbers)
        for number, part in zip(numbers, parts, strict=True):
            ids = sequence_models.batch_of(number)["input_ids"]
            assert torch.equal(part["input_ids"], ids[:, 8 * rank : 8 * rank + 8])
            assert part["position_ids"][0].tolist() == list(range(8 * rank, 8 * rank + 8))
            assert part["shift_labels"].shape == (2, 8)
        assert [one["input_ids"].tolist() for one in again] == [
            one["input_ids"].tolist() for one in parts[1:]
        ]


@pytest.mark.parametrize(
    ("batches", "own", "numbers"), [("same", 0, [1, 2]), ("in turn", 10, [1, 11, 2, 12])]
)
def test_inside_whole_the_loader_gives_each_rank_whole_batches(batches, own, numbers):
    def work(group):
        model = built("llama")
        sequences = divided(group, model)
        with sequences.whole():
            return list(SequenceParallelLoader(Loader(own * group.rank), sequences, batches=batches))

    for given in on_ranks(2, work):
        for number, one in zip(numbers, given, strict=True):
            whole = sequence_models.batch_of(number)
            assert one.keys() == whole.keys(), "with nothing that is of a part"
            assert all(torch.equal(one[name], whole[name]) for name in whole)


def test_what_is_no_tensor_goes_to_the_other_ranks_in_turn_or_is_named():
    def work(group, **more):
        given = sequence_models.batch_of(group.rank) | {"source": {"shape": group.rank}} | more
        loader = SequenceParallelLoader([given], divided(group, built("llama")), batches="in turn")
        return [part["source"] for part in loader]

    assert on_ranks(2, work) == [[{"shape": 0}, {"shape": 1}]] * 2
    said = fails(lambda group: work(group, weight=np.ones(1)), infinity.UnsupportedError)
    assert "'weight' of a batch, of type ndarray, cannot go" in said


def fails(work, error, size=2):
    with pytest.raises(error) as found:
        on_ranks(size, work)
    return str(found.value)


def test_ranks_whose_parts_differ_in_length_are_named_with_their_numbers():
    def work(group):
        model = built("llama")
        divided(group, model)
        model(input_ids=torch.ones(1, 4 + group.rank, dtype=torch.long))

    said = fails(work, infinity.RanksError)
    assert "rank 0: 1 x 4 tokens" in said
    assert "rank 1: 1 x 5 tokens" in said
    assert "pad_to_multiple_of" in said


def test_ranks_whose_batches_differ_are_named():
    def work(group):
        sequences = divided(group, built("llama"))
        list(SequenceParallelLoader([sequence_models.batch_of(group.rank)], sequences))

    assert "num_replicas=sequences.data_ranks" in fails(work, infinity.RanksError)


def test_the_whole_batch_on_every_rank_is_warned_of(caplog):
    def work(group):
        model = built("llama")
        divided(group, model)
        model(**sequence_models.batch_of(0))

    on_ranks(2, work)
    assert "the 2 ranks of a sequence have the same tokens" in caplog.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, "Masks of queries and keys cannot be split"),
        ({"position_ids": torch.zeros(3, 2, 8)}, "position_ids is (3, 2, 8)"),
        ({"output_router_logits": True}, "a loss of the routers over all tokens"),
        ({"past_key_values": object()}, "past_key_values: a cache"),
        ({"output_attentions": True}, "the weights of all heads"),
    ],
)
def test_arguments_that_cannot_be_split_are_refused_by_name(more, says):
    def work(group):
        model = built("llama")
        part = divided(group, model).split(sequence_models.batch_of(0))
        model(**{**part, **more})

    assert says in fails(work, infinity.UnsupportedError)


def test_a_part_of_the_model_called_by_itself_is_refused():
    def work(group):
        model = built("llama")
        divided(group, model)
        model.model(torch.ones(1, 4, dtype=torch.long))

    assert "Call that one" in fails(work, infinity.UnsupportedError)


def test_eager_attention_is_refused_with_what_to_choose():
    def work(group):
        model = built("llama")
        model.set_attn_implementation("eager")
        divided(group, model)

    said = fails(work, infinity.UnsupportedError)
    assert "attn_implementation='eager'" in said
    assert 'attention="sdpa"' in said


def test_heads_that_the_ranks_do_not_divide_are_refused_with_the_sizes_that_work():
    said = fails(lambda group: divided(group, built("qwen3")), infinity.ConfigError, size=3)
    assert "8 query heads and 2 key heads cannot be divided among 3 ranks" in said
    assert "1, 2, 4, 8" in said


def test_models_that_mix_tokens_outside_of_attention_are_refused():
    config = transformers.Qwen3NextConfig(
        **{**sequence_models.SIZES, "num_hidden_layers": 4}, num_experts=4, num_experts_per_tok=2, head_dim=8
    )
    with pytest.raises(infinity.UnsupportedError, match="linear_attention"):
        on_ranks(2, lambda group: divided(group, transformers.Qwen3NextForCausalLM(config)))
    with pytest.raises(infinity.UnsupportedError, match="from a decoder to an encoder"):
        on_ranks(
            2,
            lambda group: divided(
                group,
                transformers.T5ForConditionalGeneration(
                    transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
                ),
            ),
        )
    with pytest.raises(infinity.UnsupportedError, match="not a model of transformers"):
        on_ranks(2, lambda group: divided(group, torch.nn.Linear(2, 2)))


def test_a_model_is_divided_once():
    def work(group):
        model = built("llama")
        divided(group, model)
        divided(group, model)

    assert "divided among ranks already" in fails(work, infinity.ConfigError)


def test_ranks_that_were_connected_for_a_model_that_is_refused_are_closed(monkeypatch):
    closed = []
    three = types.SimpleNamespace(
        rank=0, size=3, channel=lambda: None, close=lambda: closed.append("connections")
    )
    monkeypatch.setattr(sequences, "_ranks", lambda *_: (three, (0, 1)))
    with pytest.raises(infinity.ConfigError):
        infinity.sequence_parallel(built("llama"), 3)
    assert closed == ["connections"]
    with infinity.Init(nvme=None, host_memory="64MiB"):
        model = built("llama")
    with pytest.raises(infinity.ConfigError):
        infinity.sequence_parallel(model, 3)
    assert closed == ["connections"], "those of the engine go with it"
    engine_of_model(model).ranks.close()
    assert closed == ["connections"] * 2
