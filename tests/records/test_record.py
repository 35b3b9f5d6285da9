"""Where records lie. The disk is faked: a store in memory whose transfers take a moment."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeDisk
from infinity.errors import CorruptionError, HostMemoryError
from infinity.planning.layout import FlatLayout, RecordSchema, lay_out, tiles
from infinity.records.record import Record, Traffic
from infinity.sizes import BLOCK
from infinity.storage.memory import Arena, Ledger, view
from infinity.storage.store import HostStore

FORMS = {name: RecordSchema(name) for name in ("fp32", "bf16", "int8")}
TILE = 4096  # elements: whole blocks in any format


class CountedDisk(FakeDisk):
    """Knows which extents are in use."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.used = []

    def allocate(self, nbytes, what):
        self.used.append(super().allocate(nbytes, what))
        return self.used[-1]

    def free(self, extent):
        self.used.remove(extent)


def record_of(numel, *, schema="fp32", tile_numel=TILE, verify="always"):
    shard = FlatLayout((), numel)
    return Record(shard, tile_numel, Traffic(), verify=verify, schema=FORMS[schema], name="layers.3")


def host(room=1 << 24):
    return HostStore(Ledger(room))


def filled(nbytes, first=0):
    """Memory in which no two tiles are alike."""
    arena = Arena(nbytes)
    view(arena.address, nbytes)[:] = bytes((first + index // 97) % 251 for index in range(nbytes))
    return arena


def write(record, name, start, stop, arena):
    record.checksums(start, stop, {name: arena.address}, (), (name,)).keep()
    record.write(name, start, stop, arena.address, arena).wait()


def compare(record, name, start, stop, address):
    record.checksums(start, stop, {name: address}, (name,), ()).compare()


# Offsets and tiles


forms = st.sampled_from(list(FORMS))
names = {schema: st.sampled_from([*FORMS[schema].fields, "grad16", "grad32"]) for schema in FORMS}


@st.composite
def fields(draw):
    """A record in host memory with one field: (record, name, elements of a tile)."""
    schema = draw(forms)
    name = draw(names[schema])
    align = FORMS[schema].align_numel
    tile_numel = align * draw(st.integers(1, 4))
    record = record_of(align * draw(st.integers(0, 12)), schema=schema, tile_numel=tile_numel)
    record.add(name, host())
    return record, name, tile_numel


@given(fields())
def test_spans_lie_one_behind_the_other_on_whole_blocks_and_fill_the_field(record_name_tile):
    record, name, tile_numel = record_name_tile
    assert (record.span(name) > tile_numel) == (name == "scale")
    assert (name in record.packed) == (name == "scale" and record.shard.numel > tile_numel)
    base = record.host_address(name, 0)
    end = base
    for start, stop in tiles(record.shard.numel, record.span(name)):
        assert record.host_address(name, start) == end
        assert end % BLOCK == 0
        end += record.tile_nbytes(name, stop - start)
        assert record.tile_nbytes(name, stop - start) >= record.schema.nbytes(name, stop - start)
    assert end - base == record.field_nbytes(name)


@given(fields(), st.data())
def test_elements_within_a_tile_lie_as_their_format_says(record_name_tile, data):
    record, name, tile_numel = record_name_tile
    for start, stop in tiles(record.shard.numel, tile_numel):
        block = data.draw(st.integers(0, (stop - start) // 256 - 1))  # what shares a scale stays together
        address = record.host_address(name, start + 256 * block)
        assert address == record.host_address(name, start) + record.schema.nbytes(name, 256 * block)
        assert address == record.address(name, start + 256 * block)


def test_8_bit_scales_of_several_tiles_share_a_block():
    record = record_of(33 * TILE, schema="int8")
    assert record.schema.nbytes("scale", TILE) == TILE // 256 * 8 == 128
    assert record.span("scale") == 32 * TILE
    record.add("scale", host())
    assert record.field_nbytes("scale") == record.nbytes("host") == 2 * BLOCK
    assert record.host_address("scale", 2 * TILE) - record.host_address("scale", 0) == 256
    assert record.host_address("scale", TILE + 512) - record.host_address("scale", TILE) == 16
    record.note_written("scale", 0, TILE)
    assert [record.written("scale", tile * TILE) for tile in (0, 1, 31, 32)] == [True, True, True, False]


@pytest.mark.parametrize("tile_numel", [TILE * 32, TILE * 64])
def test_8_bit_scales_of_a_tile_that_fills_its_blocks_are_moved_with_it(tile_numel):
    record = record_of(2 * tile_numel, schema="int8", tile_numel=tile_numel)
    record.add("scale", host())
    assert record.packed == frozenset()
    assert record.field_nbytes("scale") == 2 * tile_numel // 256 * 8


def test_a_field_that_an_earlier_version_has_laid_out_keeps_its_gaps_until_it_is_dropped():
    record, disk = record_of(33 * TILE, schema="int8"), CountedDisk()
    assert record.span_of("scale", 2 * BLOCK) == 32 * TILE
    assert record.span_of("scale", 33 * BLOCK) == TILE
    assert record.span_of("scale", 3 * BLOCK) is None
    record.restore("scale", disk.allocate(33 * BLOCK, "scale"), array("Q", [1] * 33), TILE)
    assert ("scale" in record.packed, record.field_nbytes("scale")) == (False, 33 * BLOCK)
    assert len(record.new_hashes("scale")) == 33
    record.drop("scale")
    record.add("scale", disk)
    assert ("scale" in record.packed, record.field_nbytes("scale")) == (True, 2 * BLOCK)
    assert len(record.new_hashes("scale")) == 2


@pytest.mark.parametrize(
    ("schema", "nbytes"),
    [("fp32", 2 + 2 + 4 + 4), ("bf16", 2 + 2 + 2 + 2), ("int8", 2 + 2 + 1 + 1 + 1 / 2)],
)
def test_a_record_takes_what_its_format_says(schema, nbytes):
    record = record_of(2 * TILE, schema=schema)
    disk = CountedDisk()
    for name in record.schema.fields:
        record.add(name, disk)
    assert record.nbytes("nvme") == len(disk.data) == nbytes * 2 * TILE
    assert record.nbytes("host") == 0


# What was written, and what is read


def test_a_tile_counts_as_written_from_its_write_on_and_no_other_does():
    record = record_of(3 * TILE - 2048)
    assert not record.written("m", 0), "there is no such field"
    record.add("m", CountedDisk())
    assert not any(record.written("m", start) for start in range(0, 3 * TILE, TILE))
    write(record, "m", TILE, 2 * TILE, filled(4 * TILE))
    assert [record.written("m", start) for start in (0, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_what_is_written_in_place_is_remembered_tile_by_tile_the_last_one_too():
    record = record_of(3 * TILE - 2048)
    record.add("m", host())
    record.note_written("m", TILE, 3 * TILE - 2048)
    assert [record.written("m", tile * TILE) for tile in range(3)] == [False, True, True]


def test_a_field_that_comes_back_has_not_been_written():
    record, disk = record_of(TILE), CountedDisk()
    record.add("grad16", disk)
    write(record, "grad16", 0, TILE, filled(2 * TILE))
    record.drop("grad16")
    assert "grad16" not in record
    assert not record.written("grad16", 0)
    assert disk.used == []
    record.drop("grad16")  # it is gone already
    record.add("grad16", disk)
    assert not record.written("grad16", 0)


@pytest.mark.parametrize("schema", ["fp32", "int8"])
def test_several_tiles_written_at_once_are_read_and_checked_one_by_one(seed, schema):
    record = record_of(3 * TILE - 2048 * (schema == "fp32"), schema=schema)
    record.add("m", FakeDisk(seed))
    nbytes = record.field_nbytes("m")
    written, found = filled(nbytes), Arena(nbytes)
    write(record, "m", 0, record.shard.numel, written)
    for start, stop in ((TILE, 2 * TILE), (2 * TILE, record.shard.numel), (0, record.shard.numel)):
        record.read("m", start, stop, found.address, found).wait()
        compare(record, "m", start, stop, found.address)
        first, length = record.schema.nbytes("m", start), record.schema.nbytes("m", stop - start)
        assert bytes(view(found.address, length)) == bytes(view(written.address + first, length))


@pytest.mark.parametrize("verify", ["always", "off"])
def test_a_tile_that_changed_on_its_way_is_refused_by_name_and_place_if_verified(verify):
    record, disk = record_of(3 * TILE, verify=verify), FakeDisk()
    record.add("hi", disk)
    memory = filled(6 * TILE)
    write(record, "hi", 0, 3 * TILE, memory)
    compare(record, "hi", 0, 3 * TILE, memory.address)
    view(memory.address, 6 * TILE)[4 * TILE - 1] ^= 16  # in the last byte of the second tile
    compare(record, "hi", 0, TILE, memory.address)
    compare(record, "hi", 2 * TILE, 3 * TILE, memory.address + 4 * TILE)
    if verify == "always":
        message = (
            r"layers\.3\.hi: the 8192 bytes read from fake disk at byte 8192 .*checksum \w{16}, expected"
        )
        with pytest.raises(CorruptionError, match=message):
            compare(record, "hi", 0, 3 * TILE, memory.address)
    else:
        compare(record, "hi", 0, 3 * TILE, memory.address)


@pytest.mark.parametrize("verify", ["always", "sample", "off"])
def test_a_tile_counts_as_written_once_its_checksum_is_kept(verify):
    record = record_of(2 * TILE, verify=verify)
    record.add("m", FakeDisk())
    memory = filled(8 * TILE)
    sums = record.checksums(TILE, 2 * TILE, {"m": memory.address}, (), ("m",))
    assert not record.written("m", TILE), "who steps first may still ask"
    sums.keep()
    assert [record.written("m", start) for start in (0, TILE)] == [False, True]


def test_a_range_that_begins_inside_a_tile_is_refused():
    record = record_of(2 * TILE)
    record.add("hi", FakeDisk())
    with pytest.raises(ValueError, match=r"layers\.3\.hi: element 2048 is inside a tile of 4096"):
        compare(record, "hi", 2048, TILE, filled(2 * TILE).address)


def test_traffic_is_counted_by_tier_and_field_in_the_bytes_that_move():
    record = record_of(64 * TILE, schema="int8")
    memory = filled(32 * TILE)
    for name in ("m", "scale"):
        record.add(name, FakeDisk())
        write(record, name, 0, 32 * TILE, memory)
        write(record, name, 32 * TILE, 64 * TILE, memory)
        record.read(name, 0, 32 * TILE, memory.address, memory).wait()
    traffic = record._traffic
    assert traffic.written == {("nvme", "m"): 64 * TILE, ("nvme", "scale"): 2 * BLOCK}
    assert traffic.read == {("nvme", "m"): 32 * TILE, ("nvme", "scale"): BLOCK}


def test_a_field_in_host_memory_is_used_there_and_never_transferred():
    record, memory = record_of(TILE), filled(2 * TILE)
    record.add("hi", host())
    for transfer in (record.read, record.write):
        with pytest.raises(TypeError, match=r"layers\.3\.hi is in host memory"):
            transfer("hi", 0, TILE, memory.address, memory)
    assert not record.written("hi", 0)
    assert not record._traffic.read + record._traffic.written


# Where fields lie


def test_a_record_knows_the_tier_of_each_field():
    record, store = record_of(TILE), host()
    record.add("hi", store)
    assert record.all_in_host
    record.add("lo", FakeDisk())
    assert record.tiers() == (("hi", "host"), ("lo", "nvme"))
    assert (record.tier("hi"), record.tier("lo")) == ("host", "nvme")
    assert (record.in_host("hi"), record.in_host("lo"), record.all_in_host) == (True, False, False)
    assert record.address("lo", 0) is None
    assert record.memory("lo") is None
    assert record.memory("hi") is store.memory(record._extents["hi"])
    assert (record.nbytes("host"), record.nbytes("nvme")) == (2 * TILE, 2 * TILE)


def test_a_spilled_gradient_on_nvme_does_not_take_a_record_out_of_host_memory():
    record, store = record_of(TILE), host()
    for name in record.schema.fields:
        record.add(name, store)
    record.add("grad16", FakeDisk())
    assert record.all_in_host


def test_a_field_without_room_is_refused_by_name_and_the_record_stays_without_it():
    record = record_of(TILE)
    with pytest.raises(HostMemoryError, match=r"layers\.3\.m: 16\.0 KiB do not fit"):
        record.add("m", host(room=4 * TILE - 1))
    assert "m" not in record


def test_an_adopted_field_lies_in_its_target_and_its_extent_is_free():
    record, disk, store = record_of(2 * TILE), CountedDisk(), host()
    record.add("m", disk)
    write(record, "m", 0, TILE, filled(4 * TILE))
    target = record.targets["m"] = store.allocate(record.field_nbytes("m"), "m")
    assert record.address("m", 0) is None, "it is only going to lie there"
    assert record.target_address("m", TILE) == target.offset + 4 * TILE
    assert record.memory("m") is store.memory(target)
    record.adopt("m")
    assert record.targets == {}
    assert disk.used == []
    assert record.address("m", TILE) == target.offset + 4 * TILE
    assert [record.written("m", start) for start in (0, TILE)] == [True, False]


def test_a_field_dropped_on_its_way_up_gives_both_its_places_back():
    record, disk, store = record_of(TILE), CountedDisk(), host()
    record.add("m", disk)
    record.targets["m"] = store.allocate(record.field_nbytes("m"), "m")
    record.drop("m")
    assert (disk.used, store.ledger.held_nbytes, record.targets) == ([], 0, {})


def test_a_field_that_moves_down_lies_where_its_tiles_were_written(seed):
    record, store, disk = record_of(2 * TILE), host(), CountedDisk(seed)
    record.add("hi", store)
    disk.allocate(3 * BLOCK, "somebody else's")
    memory = filled(4 * TILE)
    record.note_written("hi", TILE, 2 * TILE)
    hashes, extent = array("Q", [0, 0]), disk.allocate(record.field_nbytes("hi"), "hi")
    record.write_to(extent, hashes, "hi", TILE, 2 * TILE, memory.address, memory).wait()
    assert record.in_host("hi"), "until all of it is written"
    record.move("hi", extent, hashes)
    assert record.tier("hi") == "nvme"
    assert store.ledger.held_nbytes == 0
    assert [record.written("hi", start) for start in (0, TILE)] == [False, True]
    found = Arena(2 * TILE)
    record.read("hi", TILE, 2 * TILE, found.address, found).wait()
    compare(record, "hi", TILE, 2 * TILE, found.address)
    assert bytes(view(found.address, 2 * TILE)) == bytes(view(memory.address, 2 * TILE))


def test_a_field_that_comes_to_host_memory_is_to_be_written_to_its_home_again():
    record, store = record_of(TILE), host()
    record.add("hi", FakeDisk())
    record.move("hi", store.allocate(record.field_nbytes("hi"), "hi"), array("Q", [1]))
    assert record.changed_in_host == {"hi"}, "what a commit has written before is older"
    record.changed_in_host.clear()
    record.move("hi", FakeDisk().allocate(record.field_nbytes("hi"), "hi"), array("Q", [1]))
    assert record.changed_in_host == set()


def test_memory_that_is_left_keeps_its_values_and_the_field_goes_on_with_the_same_ones():
    record, store = record_of(TILE), host()
    record.add("hi", store)
    view(record.host_address("hi", 0), 2 * TILE)[:] = bytes([7]) * 2 * TILE
    record.note_written("hi", 0, TILE)
    old, held = record.memory("hi"), store.ledger.held_nbytes
    record.give_new_memory("hi")
    assert record.memory("hi") is not old
    assert bytes(view(record.host_address("hi", 0), 2 * TILE)) == bytes([7]) * 2 * TILE
    view(record.host_address("hi", 0), 2 * TILE)[:] = bytes([8]) * 2 * TILE
    assert old[:] == bytes([7]) * 2 * TILE
    assert record.written("hi", 0)
    assert store.ledger.held_nbytes == held, "who holds the old memory pays for it"
    record.drop("hi")
    assert store.ledger.held_nbytes == 0


def test_a_record_is_addresses_in_host_memory_once_every_tile_of_every_field_was_written_there():
    record, store = record_of(2 * TILE), host()
    for name in ("hi", "lo"):
        record.add(name, store)
        assert record.addresses_in_host() is None
        record.note_written(name, 0, TILE)
        assert record.addresses_in_host() is None, "its second tile was not"
        record.note_written(name, TILE, 2 * TILE)
        assert record.addresses_in_host() == {one: record.host_address(one, 0) for one in record.fields}
    record.give_new_memory("lo")
    assert record.addresses_in_host() == {one: record.host_address(one, 0) for one in ("hi", "lo")}
    record.move("lo", FakeDisk().allocate(record.field_nbytes("lo"), "lo"), array("Q", [1, 1]))
    assert record.addresses_in_host() is None, "a field lies on NVMe"
    record.drop("lo")
    assert record.addresses_in_host() == {"hi": record.host_address("hi", 0)}


def test_tiles_with_gaps_between_them_are_never_addresses_in_host_memory():
    record = record_of(2 * TILE, tile_numel=1024)
    record.add("hi", host())
    record.note_written("hi", 0, 2 * TILE)
    assert record.addresses_in_host() is None


def test_a_field_on_nvme_has_no_memory_to_leave():
    record, disk = record_of(TILE), CountedDisk()
    record.add("hi", disk)
    record.give_new_memory("hi")
    assert disk.used == [record._extents["hi"]]


def test_parameters_get_their_names_in_the_finished_model():
    shard = lay_out([("a", (3,)), ("b", (2, 2))])
    record = Record(shard, TILE, Traffic())
    record.rename(["model.a", "model.b"])
    assert [one.name for one in record.shard.segments] == ["model.a", "model.b"]
    assert [(one.start, one.shape) for one in record.shard.segments] == [
        (one.start, one.shape) for one in shard.segments
    ]
    with pytest.raises(ValueError, match="zip"):
        record.rename(["model.a"])


def test_a_record_tells_when_it_has_other_fields_and_not_when_one_is_moved():
    changed, record = set(), record_of(TILE)
    record.tell_fields(changed, 3)
    record.add("hi", host())
    assert changed == {3}
    changed.clear()
    record.move("hi", host().allocate(record.field_nbytes("hi"), "hi"), record.new_hashes("hi"))
    assert not changed
    record.drop("hi")
    assert changed == {3}
