"""Which ranks have memory in common. Faked: the other ranks' settings, and their machines."""

import logging
import os
import types

import pytest
import torch

import infinity
from infinity import Config, ConfigError
from infinity.engine import sharing
from infinity.engine.sharing import shares_memory

HOST, OTHER = (types.SimpleNamespace(is_host=is_host) for is_host in (True, False))
ON = Config(shared_memory=True)


class Ranks:
    """This one, on a machine with `near` ranks, and others that say what they say."""

    def __init__(self, *others, near=2):
        self.size, self.near, self.others = 1 + len(others), list(range(near)), others

    def of_all(self, values, _what):
        return [list(map(int, values)), *map(list, self.others)]


def test_ranks_of_one_machine_share_its_memory_where_all_say_so():
    assert shares_memory(ON, Ranks((1, 2, 1)), HOST)
    assert not shares_memory(Config(), Ranks((0, 2, 1)), HOST)
    assert not shares_memory(Config(), Ranks((0, 1, 0), near=1), OTHER)


@pytest.mark.parametrize(
    ("ranks", "device", "said"),
    [
        (Ranks((0, 2, 1)), HOST, "rank 0: shared_memory=True; rank 1: shared_memory=False"),
        (Ranks((1, 2, 1)), OTHER, r"an accelerator computes: .* \(device=\"cpu\"\)"),
        (Ranks((1, 1, 1), (1, 2, 1)), HOST, "3 ranks on several machines .* of each: 2, 1, 2.*process_group"),
        (Ranks((1, 2, 0)), HOST, "memfd_create"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_cure(ranks, device, said):
    with pytest.raises(ConfigError, match=said):
        shares_memory(ON, ranks, device)


def test_a_process_that_may_make_no_memory_is_refused_and_makes_none_where_none_is_shared(monkeypatch):
    asked = []

    def forbidden(*_):
        asked.append(True)
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    assert not shares_memory(Config(), Ranks((0, 2, 1)), HOST)
    assert not asked
    with pytest.raises(ConfigError, match=r"vm\.memfd_noexec=2 forbids them; leave it out"):
        shares_memory(ON, Ranks((1, 2, 1)), HOST)


def test_one_rank_is_told_once_and_trains(caplog):
    caplog.set_level(logging.WARNING, sharing.logger.name)
    with infinity.Init(Config(host_memory="16MiB", shared_memory=True)):
        model = torch.nn.Linear(8, 8)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    said = [one.message for one in caplog.records if "shared_memory" in one.message]
    assert said == ["shared_memory=True: there is one rank, which shares with none; nothing is done"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shared_memory": 1}, "shared_memory=1: expected True or False"),
        ({"shared_memory": True, "quantized_weights": "int8"}, "send each other no weights"),
        ({"shared_memory": True, "secondary_shard": 2}, "with secondary_shard=2"),
        ({"shared_memory": True, "expert_parallel": 2}, "with expert_parallel=2"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        Config(**fields)


def test_a_configuration_of_deepspeeds_has_the_key():
    source = {"train_batch_size": 2, "infinity": {"shared_memory": True}}
    assert Config.from_deepspeed(source).shared_memory
