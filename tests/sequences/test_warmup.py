"""A loader whose sequences are short at first. Trusted: planning.lengths, which is tested for itself."""

import pytest
import torch
from torch.utils.data import DataLoader

import infinity
import models
from infinity.engine.engine import engine_of_model

DATA = [{"input_ids": torch.arange(16) + 100 * row, "attention_mask": torch.ones(16)} for row in range(8)]
LINEAR = {"shortest": 4, "longest": 16, "steps": 6, "multiple": 4}


def warmed(loader=None, **options):
    loader = DataLoader(DATA, batch_size=2) if loader is None else loader
    return infinity.SequenceWarmup(loader, **{**LINEAR, **options})


def lengths(warmup, epochs=1):
    return [batch["input_ids"].shape[1] for _ in range(epochs) for batch in warmup]


def test_batches_grow_with_the_steps_and_everything_of_the_tokens_is_cut():
    warmup = warmed()
    assert len(warmup) == 4
    for length, batch in zip([4, 8, 8, 12], warmup, strict=True):
        assert {name: one.shape for name, one in batch.items()} == dict.fromkeys(batch, (2, length))
        assert batch["input_ids"].tolist() == [one[:length] for one in _whole(batch)]
    assert lengths(warmup) == [12, 16, 16, 16]
    assert warmup.dataset is DATA


def _whole(batch):
    return [list(range(first, first + 16)) for first in batch["input_ids"][:, 0].tolist()]


def test_a_step_of_several_batches_has_one_length():
    assert lengths(warmed(accumulate=2), epochs=2) == [4, 4, 8, 8, 8, 8, 12, 12]


def test_where_the_batches_of_a_step_change_the_steps_go_on():
    warmup, found = warmed(accumulate=2), []
    for number, batch in enumerate(warmup):
        found.append(batch["input_ids"].shape[1])
        if number == 1:
            warmup.set_accumulate(1)
    assert found == [4, 4, 8, 8]  # of the steps 1, 1, 2, 3
    assert warmup.batches == 3
    warmup.set_accumulate(3)
    assert lengths(warmup) == [12] * 4  # the steps 4 and 5
    with pytest.raises(infinity.ConfigError, match="accumulate=0"):
        warmup.set_accumulate(0)


def test_it_goes_on_after_steps_that_were_counted_elsewhere():
    warmup = warmed(accumulate=2)
    warmup.seek(3, 1)
    assert lengths(warmup) == [12, 12, 12, 16]
    custom = infinity.SequenceWarmup([torch.ones(1, 16)], 4, 8, schedule="custom", function=lambda _: 4)
    custom.seek(2, length=16)  # was at the longest, of a schedule with a longer one
    assert [one.shape[1] for one in custom] == [8]


def test_tensors_alone_are_cut_and_shorter_batches_stay():
    warmup = infinity.SequenceWarmup([torch.ones(2, 16), torch.ones(2, 5)], 8, 16, steps=4)
    assert [tuple(one.shape) for one in warmup] == [(2, 8), (2, 5)]


@pytest.mark.parametrize("given", [1, 4, 6])
def test_it_goes_on_in_the_middle_where_its_state_was_taken(given):
    whole = [batch for _ in range(3) for batch in warmed()]
    first, again = warmed(), warmed()
    expected = lengths(first, epochs=3)
    first, batches = warmed(), []
    for _ in range(3):
        for batch in first:
            batches.append(batch)
            if len(batches) == given:
                state = first.state_dict()
    del whole
    again.load_state_dict(state)
    assert again.state_dict()["batches"] == given
    rest = [batch for _ in range(3) for batch in again][: 12 - given]
    assert [batch["input_ids"].tolist() for batch in rest] == [
        batch["input_ids"].tolist() for batch in batches[given:]
    ]
    assert [batch["input_ids"].shape[1] for batch in batches] == expected


class Stateful:
    """A loader with a state of its own."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 4:
            self.place += 1
            yield torch.full((1, 16), self.place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_a_loader_with_a_state_is_asked_for_it_and_given_it():
    first, again = warmed(Stateful()), warmed(Stateful())
    iterated = iter(first)
    next(iterated), next(iterated)
    again.load_state_dict(first.state_dict())
    assert [one.tolist() for one in again] == [one.tolist() for one in iterated]


def test_a_durable_run_tracks_it(folder):
    def build():
        torch.manual_seed(0)
        with infinity.Init(nvme=str(folder), host_memory="64MiB", durable=True):
            model = models.MODELS["llama"]()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        warmup = warmed(DataLoader([{"input_ids": one["input_ids"] % 64} for one in DATA], batch_size=2))
        optimizer.track(loader=warmup)
        return model, optimizer, warmup, infinity.resume(model, optimizer)

    def train(model, optimizer, warmup, steps):
        seen = []
        for _, batch in zip(range(steps), warmup, strict=False):
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(batch["input_ids"].tolist())
        infinity.commit(model)
        return seen

    model, optimizer, warmup, _ = build()
    first = train(model, optimizer, warmup, 2)
    engine_of_model(model).close()
    model, optimizer, warmup, done = build()
    assert done == 2
    assert train(model, optimizer, warmup, 1)[0] not in first
    assert (warmup.batches, warmup.length) == (3, 8)
    engine_of_model(model).close()


def test_the_plan_of_a_step_fits_steps_of_other_lengths():
    torch.manual_seed(0)
    with infinity.Init(host_memory="64MiB"):
        model = models.MODELS["llama"]()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for batch in warmed(DataLoader([{"input_ids": one["input_ids"] % 64} for one in DATA], batch_size=2)):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(infinity.stats(model).divergences)
    assert seen == [seen[0]] * 4


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([1, 2], "a batch is a list"),
        ({"labels": torch.ones(2)}, "expected a dict with input_ids or inputs_embeds"),
        ({"input_ids": torch.ones(2, 16), "attention_mask": torch.ones(2, 1, 16, 16)}, "cannot be cut"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused_by_name(batch, says):
    with pytest.raises(infinity.UnsupportedError) as error:
        list(warmed([batch]))
    assert says in str(error.value)
