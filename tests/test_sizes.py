"""Sizes as users write them. Nothing is faked."""

import pytest

from infinity.sizes import BLOCK, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("64k", 65536),
        ("7", 7),
        (4096, 4096),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read_as_it_is_meant(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "four", "4 GiBs", "-1", -1, True, None, 1.5, "1e3"])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(ValueError, match="host_memory"):
        parse_size(text, "host_memory")


def test_sizes_are_printed_for_people():
    found = [format_size(nbytes) for nbytes in (0, 1023, 512 << 20, 3 << 39)]
    assert found == ["0 B", "1023 B", "512.0 MiB", "1.5 TiB"]


def test_rounding_up_never_goes_down():
    assert [round_up(n, BLOCK) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]
