"""What ranks decide to do together. Faked: the other ranks' settings, their machines, and the device."""

import logging
import os
import resource
import types

import pytest
import torch

import infinity
from infinity import Config, ConfigError
from infinity.engine import rank_features as decided
from infinity.engine.rank_features import RankFeatures
from infinity.gradients.coding import Coding
from infinity.ranks import shared_memory

HOST, OTHER = (types.SimpleNamespace(is_host=is_host) for is_host in (True, False))
BOTH = {"quantized_weights": "int8", "quantized_gradients": "int4"}


class Ranks:
    """This one, the first, and others with these settings, or with its own, on these machines, of which `no`
    have no nameless memory, `limited` have a limit of file sizes, and `apart` are reached elsewhere.
    """

    device = "cuda:1"

    def __init__(self, machines=(1, 1), others=None, buckets=None, no=(), limited=(), apart=()):
        self.size, self.machines, self.others, self.buckets = len(machines), machines, others, buckets
        self.no, self.limited, self.apart = no, limited, apart

    def each(self, said, _what):
        if self.others is None:
            return [said] * self.size
        lines = [
            "\n".join(decided.said(name, getattr(one, name)) for name in decided._SAME) for one in self.others
        ]
        return [said, *(one.encode() for one in lines)]

    def of_all(self, values, _what):
        values = list(map(int, values))
        return [
            [
                values[0] if self.buckets is None else self.buckets[rank],
                machine,
                values[2] and rank not in self.no,
                values[3] and rank not in self.limited,
                values[4] + (rank in self.apart),
            ]
            for rank, machine in enumerate(self.machines)
        ]


def decide(ranks=None, device=HOST, **fields):
    return decided.rank_features(Config(**fields), ranks or Ranks(), device)


@pytest.fixture(autouse=True)
def trial(monkeypatch):
    """What trying memory in common says: nothing is in its way, unless a test says otherwise."""
    found = types.SimpleNamespace(why="", tried=0)

    def tried(_ranks, timeout_s):
        assert timeout_s == 600.0
        found.tried += 1
        return found.why

    monkeypatch.setattr(decided, "why_not_together", tried)
    return found


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "infinity")
    return lambda level=logging.WARNING: [one.message for one in caplog.records if one.levelno >= level]


# Settings


def test_ranks_with_the_same_settings_do_what_these_say():
    found = decide(**BOTH)
    assert (found.weights, found.gradients) == (Coding(8), Coding(4))
    assert decide(quantized_gradients="int8").gradients == Coding(8)
    assert decide(quantized_gradients="int8").weights is None
    plain = decide(shared_memory=False, device=OTHER)
    assert plain == RankFeatures(16 << 20, memory="shared_memory=False")


def test_the_smallest_bucket_of_all_ranks_is_taken():
    assert decide(Ranks(buckets=[4096, 512])).bucket_nbytes == 512


@pytest.mark.parametrize(
    ("others", "fields", "told"),
    [
        (
            [{"quantized_gradients": "int4"}],
            BOTH,
            "rank 0: quantized_weights='int8'; rank 1: quantized_weights=None",
        ),
        ([{"shared_memory": False}], {}, "rank 0: shared_memory='auto'; rank 1: shared_memory=False"),
        ([{"secondary_shard": 2}, {}], {}, "rank 1: secondary_shard=2; rank 2: secondary_shard=None"),
        ([{"stage": 1}], {}, "rank 0: stage=3; rank 1: stage=1"),
        ([{"dtype": "fp32"}], {}, 'rank 0: dtype="bf16"; rank 1: dtype="fp32"'),
        ([{"master_dtype": "fp24"}], {}, "rank 0: master_dtype='fp32'; rank 1: master_dtype='fp24'"),
        ([{"state_dtype": "int8"}], {}, "rank 0: state_dtype='fp32'; rank 1: state_dtype='int8'"),
        ([{"units": "block"}], {}, "rank 0: units='module'; rank 1: units='block'"),
        (
            [{"expert_parallel": 2, "quantized_gradients": "int8"}],
            {},
            "rank 0: quantized_gradients=None, expert_parallel=1; rank 1: quantized_gradients='int8', expert",
        ),
    ],
)
def test_ranks_with_different_settings_are_all_told_which(others, fields, told):
    ranks = Ranks([1] * (1 + len(others)), others=[Config(**one) for one in others])
    with pytest.raises(ConfigError, match=f"Give all the same Config: .*{told}"):
        decide(ranks, **fields)


def test_what_does_not_divide_the_ranks_is_refused_with_what_does():
    with pytest.raises(ConfigError, match=r"expert_parallel=2: 3 ranks cannot be divided .* 1, 3 may"):
        decide(Ranks([1, 1, 1]), expert_parallel=2)
    with pytest.raises(ConfigError, match="sequence_parallel=4: 2 ranks cannot be divided"):
        decide(sequence_parallel=4)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (BOTH, r"quantized_weights='int8' with device='cuda:1': .* \(device=\"cpu\"\)"),
        ({"quantized_gradients": "int4"}, r"'int4' with device='cuda:1': .* \(device=\"cpu\"\)"),
        ({"shared_memory": True}, r"shared_memory=True with device='cuda:1': .* \(device=\"cpu\"\)"),
        ({"expert_parallel": 2}, "expert_parallel=2 with device='cuda:1'"),
    ],
)
def test_an_accelerator_is_refused_with_the_cure(fields, told):
    with pytest.raises(ConfigError, match=told):
        decide(device=OTHER, **fields)


def test_one_rank_says_so_once_and_computes_with_its_weights_as_they_are(said):
    with infinity.Init(Config(host_memory="16MiB", **BOTH)):
        model = torch.nn.Linear(300, 300)
    (message,) = [one for one in said() if "quantized" in one]
    assert message.startswith("quantized_weights='int8', quantized_gradients='int4': there is one rank")
    weight = model.state_dict()["weight"]
    inputs = torch.randn(4, 300, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(inputs, weight, model.state_dict()["bias"])
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"shared_memory": True},
            "shared_memory=True: there is one rank, which shares with none; nothing is done",
        ),
        (
            {"secondary_shard": 2},
            "secondary_shard=2: there is one rank, which has all of the weights; no second part is kept",
        ),
        (
            {"secondary_shard": "machine"},
            "secondary_shard='machine': there is one rank, which has all of the weights; no second part is k",
        ),
    ],
)
def test_one_rank_is_told_what_it_does_not_do(fields, told, said):
    assert decide(Ranks([1]), **fields) == RankFeatures()
    (message,) = said()
    assert message.startswith(told)


# Memory in common


def test_ranks_of_one_machine_share_its_memory_by_themselves_and_say_so(said, trial):
    found = decide()
    assert (found.in_common, found.asked, found.memory) == (True, False, "chosen: one machine's CPUs")
    assert trial.tried == 1
    (message,) = said(logging.INFO)
    assert "shared_memory=False" in message


@pytest.mark.parametrize(
    ("ranks", "device", "fields", "why"),
    [
        (Ranks(), HOST, {"quantized_weights": "int8"}, "not with quantized_weights='int8'"),
        (Ranks(), HOST, {"expert_parallel": 2}, "not with expert_parallel=2"),
        (Ranks([1] * 4), HOST, {"secondary_shard": 2}, "not with secondary_shard=2"),
        (Ranks(), OTHER, {}, "not with device='cuda:1'"),
        (Ranks(), HOST, {"stage": 1}, "not with stage=1"),
        (Ranks([1, 1, 2, 2]), HOST, {}, "not with several machines"),
        (Ranks(no=[1]), HOST, {}, "not with a system without nameless memory"),
        (Ranks(limited=[1]), HOST, {}, "not with what limits another rank"),
        (Ranks(apart=[1]), HOST, {}, "not with ranks of several users, or containers"),
        (Ranks(), HOST, {"shared_memory": False}, "shared_memory=False"),
    ],
)
def test_ranks_that_would_not_gain_or_cannot_share_none_and_say_why(ranks, device, fields, why, said):
    found = decide(ranks, device, **fields)
    assert (found.in_common, found.memory) == (False, why)
    assert not said()


def test_ranks_that_have_tried_it_in_vain_share_none_and_all_say_why(said, trial):
    trial.why = "PermissionError: [Errno 1] no sockets here"
    found = decide()
    assert (found.in_common, found.memory) == (False, f"tried in vain: {trial.why}")
    (message,) = said(logging.INFO)
    assert message == (
        f"ranks share no memory: tried, and {trial.why}. Config(shared_memory=False) does not try"
    )
    assert not said(), "nobody has asked for it"


def test_nothing_is_tried_where_it_is_asked_for_or_excluded(trial):
    assert decide(shared_memory=True).asked
    decide(shared_memory=False)
    decide(Ranks([1, 1, 2, 2]))
    decide(stage=1)
    assert trial.tried == 0


def test_a_number_of_neighbours_that_comes_to_nothing_excludes_nothing():
    assert decide(Ranks([1, 1]), secondary_shard="machine").in_common


@pytest.mark.parametrize("machines", [[1, 1], [1, 1, 2, 2], [1, 1, 1, 2, 2, 2]])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_are_asked_to_share_within_each_machine(machines, stage):
    found = decide(Ranks(machines), shared_memory=True, stage=stage)
    assert (found.in_common, found.memory) == (True, "shared_memory=True")


def test_machines_with_one_rank_each_share_nothing_and_say_so(said):
    assert not decide(Ranks([1, 2]), shared_memory=True).in_common
    assert said() == ["shared_memory=True: each machine has one rank, which shares with none"]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (Ranks([1, 2, 1]), "3 ranks on several machines .* of each: 2, 1, 2.*process_group"),
        (Ranks([1, 2, 1, 2]), "4 ranks on several machines .* of each: 2, 2, 2, 2.*one after the other"),
        (Ranks(no=[1]), "memfd_create"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_cure_where_it_is_asked_for(ranks, told):
    with pytest.raises(ConfigError, match=told):
        decide(ranks, shared_memory=True)


def test_a_process_that_may_make_no_memory_shares_none_and_makes_none_where_none_is_wanted(monkeypatch):
    asked = []

    def forbidden(*_):
        asked.append(True)
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    assert not decide(shared_memory=False).in_common
    assert not asked
    assert not decide().in_common
    with pytest.raises(ConfigError, match=r"vm\.memfd_noexec=2 forbids them; leave it out"):
        decide(shared_memory=True)


def test_a_limit_of_file_sizes_is_why_ranks_share_nothing_by_themselves(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 8192))
    assert decide().memory == "not with RLIMIT_FSIZE=4096 (ulimit -f)"


def test_processes_in_another_network_or_of_another_user_are_elsewhere(monkeypatch):
    here = shared_memory.place_number()
    assert here == shared_memory.place_number()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert shared_memory.place_number() != here


def test_a_configuration_of_deepspeeds_has_the_key():
    source = {"train_batch_size": 2, "infinity": {"shared_memory": True}}
    assert Config.from_deepspeed(source).shared_memory
    assert Config.from_deepspeed({"train_batch_size": 2}).shared_memory == Config().shared_memory == "auto"


# Second parts


@pytest.mark.parametrize(
    ("given", "machines", "expected"),
    [
        ("machine", [1, 1, 2, 2], 2),
        (2, [1, 1, 2, 2], 2),
        (2, [1, 1, 1, 1], 2),
        ("machine", [1, 1, 1, 2, 2, 2], 3),
        (None, [1, 1, 2, 2], 0),
    ],
)
def test_neighbours_of_one_machine_keep_second_parts_together(given, machines, expected, said):
    assert decide(Ranks(machines), secondary_shard=given).near == expected
    assert said() == []


@pytest.mark.parametrize(
    ("given", "machines", "why"),
    [
        (1, [1, 1, 2, 2], "each rank would keep all of the weights"),
        ("machine", [1, 2, 3], "each rank would keep all of the weights"),
        (4, [1, 1, 1, 1], "all ranks keep parts together anyway"),
        ("machine", [1, 1], "all ranks keep parts together anyway"),
    ],
)
def test_where_there_is_nothing_to_gain_that_is_said_and_nothing_done(given, machines, why, said):
    assert decide(Ranks(machines), OTHER, secondary_shard=given).near == 0
    (message,) = said()
    assert message.startswith(f"secondary_shard={given!r}: {why}")


@pytest.mark.parametrize(
    ("given", "machines", "why"),
    [
        (3, [1, 1, 2, 2], "3 does not divide the 4 ranks, .*: 2 would"),
        (5, [1, 1, 1], "5 does not divide the 3 ranks, .*: none would"),
        (2, [1, 2, 1, 2], "ranks 0 to 1 are on several machines"),
        ("machine", [1, 1, 1, 2], r"the machines have \[3, 1\] ranks"),
    ],
)
def test_neighbours_that_cannot_be_are_the_same_error_on_every_rank(given, machines, why):
    with pytest.raises(ConfigError, match=why):
        decide(Ranks(machines), secondary_shard=given)


def test_second_parts_on_an_accelerator_are_refused_with_the_cure():
    with pytest.raises(ConfigError, match=r"2 with device='cuda:1': .*\(device=\"cpu\"\)"):
        decide(Ranks([1, 1, 2, 2]), OTHER, secondary_shard=2)
