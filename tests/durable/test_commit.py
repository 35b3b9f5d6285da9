"""A commit's bytes: read back as written, or not there, or refused. Trusted: xxhash and JSON."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.durable.commit import PlainTensor, hashes_of, read_slot
from infinity.storage.manifest import CheckpointError
from samples import COMMIT, FIELDS, RECORD


def test_a_commit_is_read_as_it_was_written():
    assert read_slot(COMMIT.to_bytes(), "slot") == COMMIT


def test_what_stood_behind_a_longer_commit_does_not_matter():
    assert read_slot(COMMIT.to_bytes() + bytes(range(256)), "slot") == COMMIT


@given(st.integers(0, 10_000))
def test_a_torn_commit_is_none(cut):
    data = COMMIT.to_bytes()
    cut %= len(data)
    assert read_slot(data[:cut], "slot") is None
    assert read_slot(data[:cut] + bytes(len(data) - cut), "slot") in (None, COMMIT)


def test_every_flipped_bit_is_noticed():
    data = COMMIT.to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert read_slot(bytes(flipped), "slot") is None, bit


def test_a_commit_of_another_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("infinity.durable.commit.VERSION", 3)
    data = COMMIT.to_bytes()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="slot: a commit of version 3; this Infinity reads 2"):
        read_slot(data, "slot")


@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_commit(data):
    assert read_slot(data, "slot") is None


def whole(**changes):
    return dataclasses.replace(COMMIT, **changes).to_bytes()


def field(**changes):
    return whole(records=(dataclasses.replace(RECORD, fields=(dataclasses.replace(FIELDS[0], **changes),)),))


@pytest.mark.parametrize(
    "data",
    [
        whole(run="../../etc"),
        whole(step=-1),
        whole(step=1 << 63),
        whole(tile_numel="many"),
        whole(paths=None),
        whole(said=[]),
        whole(tensors={"x": PlainTensor("OBJECT", (1,), b"")}),
        field(nbytes=-1),
        field(runs=()),
        field(runs=((8192, 2),)),
        field(runs=((8192, 0), (4096, 1))),
        field(runs=((1 << 70, 0),)),
        field(sides=([0, 1],)),
        field(sides=5),
    ],
)
def test_a_whole_commit_that_says_what_cannot_be_is_refused(data):
    with pytest.raises(CheckpointError, match="slot cannot be read"):
        read_slot(data, "slot")


def test_hashes_have_to_be_those_of_the_tiles():
    assert list(hashes_of(bytes(16), 2, "x.hi")) == [0, 0]
    with pytest.raises(CheckpointError, match=r"x\.hi: 2 hashes in the commit, expected 3"):
        hashes_of(bytes(16), 3, "x.hi")
