"""The layout of units. Pure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.layout import (
    ALIGN_NUMEL,
    STATE_BLOCK,
    FlatLayout,
    RecordSchema,
    Segment,
    lay_out,
    pieces,
    shard_of,
    tiles,
)
from infinity.sizes import BLOCK

shapes = st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes)
def test_every_parameter_has_its_own_blocks(shapes):
    shard = lay_out([(str(index), shape) for index, shape in enumerate(shapes)])
    taken = set()
    for segment, shape in zip(shard.segments, shapes, strict=True):
        assert segment.numel == math.prod(shape)
        blocks = set(range(segment.start // ALIGN_NUMEL, -(-segment.stop // ALIGN_NUMEL)))
        assert segment.start % ALIGN_NUMEL == 0
        assert not blocks & taken
        taken |= blocks
    assert shard.numel == len(taken) * ALIGN_NUMEL


@given(shapes, st.integers(1, 4))
def test_tiles_and_pieces_cover_every_element_once(shapes, blocks):
    shard = lay_out([(str(index), shape) for index, shape in enumerate(shapes)])
    covered = dict.fromkeys(range(len(shapes)), 0)
    for start, stop in tiles(shard.numel, blocks * ALIGN_NUMEL):
        for piece in pieces(shard, start, stop):
            segment = shard.segments[piece.index]
            assert piece.within == covered[piece.index]
            assert start <= piece.start == segment.start + piece.within
            assert piece.start + piece.numel <= min(stop, segment.stop)
            covered[piece.index] += piece.numel
    assert covered == {index: math.prod(shape) for index, shape in enumerate(shapes)}


def test_a_segment_off_its_block_is_refused():
    with pytest.raises(ValueError, match="starts at element 5"):
        FlatLayout((Segment("w", (3,), 5, 3),), ALIGN_NUMEL)


# Formats


FORMS = [("fp32",), ("bf16",), ("int8",), ("fp32", "fp16"), ("fp32", "fp32")]
"""Arguments of RecordSchema."""


@pytest.mark.parametrize(
    ("state_dtype", "moments", "nbytes"),
    [
        ("fp32", ("m", "v"), [2048, 2048, 4096, 4096]),
        ("bf16", ("m", "v"), [2048, 2048, 2048, 2048]),
        ("int8", ("m", "v", "scale"), [2048, 2048, 1024, 1024, 32]),
        ("int4", ("mv", "scale"), [2048, 2048, 1024, 32]),
    ],
)
def test_a_format_holds_weights_and_moments_of_its_width(state_dtype, moments, nbytes):
    schema = RecordSchema(state_dtype)
    assert schema.moments_of(("m", "v")) == moments
    assert schema.fields == ("hi", "lo", *moments)
    assert [schema.nbytes(field, 1024) for field in schema.fields] == nbytes
    assert (schema.nbytes("grad16", 1024), schema.nbytes("grad32", 1024)) == (2048, 4096)


def test_a_moment_that_is_kept_alone_takes_half_of_the_bytes_of_both():
    for state_dtype in ("fp32", "bf16", "int8", "int4"):
        schema = RecordSchema(state_dtype)
        kept = {names: schema.moments_of(names) for names in (("m",), ("v",), ("m", "v"))}
        nbytes = {
            names: sum(schema.nbytes(field, 4096) for field in fields if field != "scale")
            for names, fields in kept.items()
        }
        assert 2 * nbytes["m",] == 2 * nbytes["v",] == nbytes["m", "v"]
        assert {"scale" in fields for fields in kept.values()} == {schema.in_blocks}
        assert schema.moments_of(()) == ()
    assert RecordSchema("int4").names == ("hi", "lo", "m4", "v4", "mv", "scale")


def test_8_bit_moments_have_a_pair_of_fp32_scales_for_each_block():
    schema = RecordSchema("int8")
    assert [schema.nbytes("scale", blocks * STATE_BLOCK) for blocks in (0, 1, 2, 16)] == [0, 8, 16, 128]


@pytest.mark.parametrize(
    ("dtype", "fields", "master", "nbytes", "slot_nbytes"),
    [
        ("bf16", ("hi", "lo", "m", "v"), ("hi", "lo"), 12, 16),
        ("fp16", ("hi", "master", "m", "v"), ("master",), 14, 18),
        ("fp32", ("hi", "m", "v"), ("hi",), 12, 16),
    ],
)
def test_each_type_that_computes_has_its_fields(dtype, fields, master, nbytes, slot_nbytes):
    schema = RecordSchema("fp32", dtype)
    assert (schema.fields, schema.master, schema.slot_nbytes) == (fields, master, slot_nbytes)
    assert sum(schema.nbytes(name, 1) for name in fields) == nbytes
    assert schema.derived == (set() if "hi" in master else {"hi"})
    assert schema.nbytes(schema.gradient, 1) == schema.nbytes("hi", 1) == schema.width


@pytest.mark.parametrize("arguments", FORMS)
def test_parameters_begin_on_whole_blocks_of_every_field_but_scales(arguments):
    schema = RecordSchema(*arguments)
    fields = [field for field in (*schema.fields, "grad16", "grad32") if field != "scale"]
    assert [schema.nbytes(field, schema.align_numel) % BLOCK for field in fields] == [0] * len(fields)
    assert any(schema.nbytes(field, schema.align_numel // 2) % BLOCK for field in fields), (
        "no more than it takes"
    )
    assert schema.align_numel % STATE_BLOCK == schema.align_numel % ALIGN_NUMEL == 0


@given(st.sampled_from(FORMS), st.integers(0, 9), st.integers(0, 9 * STATE_BLOCK), st.data())
def test_bytes_of_whole_state_blocks_and_of_what_follows_add_up(arguments, blocks, numel, data):
    schema = RecordSchema(*arguments)
    field = data.draw(st.sampled_from(schema.fields))
    start = blocks * STATE_BLOCK
    assert schema.nbytes(field, start + numel) == schema.nbytes(field, start) + schema.nbytes(field, numel)


def test_a_type_that_is_none_is_refused():
    with pytest.raises(KeyError, match="fp8"):
        RecordSchema("fp8")


@given(shapes, st.sampled_from(FORMS))
def test_parameters_are_laid_out_as_a_format_asks(shapes, arguments):
    align = RecordSchema(*arguments).align_numel
    shard = lay_out([(str(index), shape) for index, shape in enumerate(shapes)], align)
    assert all(segment.start % align == 0 for segment in shard.segments)
    assert shard.numel % align == 0


@given(
    st.lists(st.integers(0, 3 * ALIGN_NUMEL), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_the_shares_of_all_ranks_are_the_unit_once(numels, ranks):
    whole = lay_out([(str(index), (numel,)) for index, numel in enumerate(numels)], ranks=ranks)
    shares = [shard_of(whole, rank, ranks) for rank in range(ranks)]
    assert {one.numel for one in shares} == {whole.numel // ranks}
    assert whole.numel % (ranks * ALIGN_NUMEL) == 0
    for index, numel in enumerate(numels):
        held = [(one.first, one.first + one.numel) for part in shares if (one := part.segments[index]).numel]
        assert [stop for _, stop in held[:-1]] == [first for first, _ in held[1:]]
        assert sum(stop - first for first, stop in held) == numel
    for rank, part in enumerate(shares):
        for piece in pieces(part, 0, part.numel):
            segment = whole.segments[piece.index]
            assert rank * part.numel + piece.start == segment.start + piece.element
            assert piece.within == piece.element - part.segments[piece.index].first


def test_a_share_ends_where_its_last_parameter_does():
    whole = lay_out([("weight", (10,))], ranks=2)
    first, second = (shard_of(whole, rank, 2) for rank in range(2))
    assert (first.end, second.end) == (10, 0)
