"""What counts as text, and that only windows of it are read. Trusted: the file system. Nothing is faked."""

import itertools
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from infinity.cli.text import Text, TextError, Windows, default_text


def batches(text, count=3, **settings):
    windows = Windows(text, **{"sequence": 8, "seed": 1, "count": 2 * count, **settings})
    return [batch["input_ids"] for batch in DataLoader(windows, 2)]


def write(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def test_a_folder_reads_as_one_text_in_the_order_of_its_names(tmp_path):
    text = Text(write(tmp_path, b=b"456", c__d=b"789", a=b"0123"))
    assert (text.nbytes, text.files) == (10, 3)
    assert text.read(0, 10) == b"0123456789"
    for start, stop in itertools.combinations(range(11), 2):
        assert text.read(start, stop - start) == b"0123456789"[start:stop]


def test_empty_files_are_no_obstacle(tmp_path):
    text = Text(write(tmp_path, a=b"", b=b"12", c=b"", d=b"", e=b"34", f=b""))
    assert text.read(0, 4) == b"1234"
    assert text.read(1, 2) == b"23"


def test_binary_and_hidden_files_links_and_caches_are_passed_over(tmp_path):
    folder = tmp_path / "text"
    write(
        folder,
        **{
            "a.txt": b"text",
            "b.so": b"\x7fELF\0\0",
            ".hidden": b"no",
            "__pycache__/c": b"no",
            ".git/d": b"no",
        },
    )
    (tmp_path / "elsewhere").write_bytes(b"no")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    text = Text(str(folder))
    assert text.read(0, text.nbytes) == b"text"


def test_a_file_that_is_named_is_taken_whatever_it_holds(tmp_path):
    assert Text(write(tmp_path, a=b"\0\1\2") + "/a").read(0, 3) == b"\0\1\2"


def test_the_same_seed_draws_the_same_windows_and_another_others(tmp_path):
    text = Text(write(tmp_path, a=bytes(range(1, 256)), b=b"x" * 1000))
    first, again, other = batches(text), batches(text), batches(text, seed=2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_window_depends_on_its_number_alone_so_that_a_longer_run_begins_alike(tmp_path):
    text = Text(write(tmp_path, a=bytes(range(1, 256)) * 99))
    short, long = (Windows(text, sequence=8, seed=1, count=count) for count in (5000, 9000))
    numbers = [4999, 0, 4096, 17]
    assert [long[one]["labels"].tolist() for one in numbers] == [
        short[one]["labels"].tolist() for one in numbers
    ]
    assert len({tuple(long[one]["input_ids"].tolist()) for one in (*numbers, 8192)}) == 5
    with pytest.raises(IndexError):
        short[5000]
    beside = Windows(text, sequence=8, seed=2, count=1)
    assert beside[0]["labels"].tolist() != long[4096]["labels"].tolist(), "seeds share no draw"


def test_a_batch_is_token_ids_found_in_the_text(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "a").write_bytes(content)
    for batch in batches(Text(str(tmp_path / "a")), count=20):
        assert (batch.shape, batch.dtype) == ((2, 8), torch.int64)
        assert all(bytes(row.tolist()) in content for row in batch)


def test_first_and_last_byte_can_be_drawn(tmp_path):
    text = Text(write(tmp_path, a=b"0123") + "/a")
    seen = {bytes(row.tolist()) for batch in batches(text, 50, sequence=3) for row in batch}
    assert seen == {b"012", b"123"}


def test_a_text_larger_than_memory_is_never_read_whole(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a TiB that takes no room
    text = Text(str(path))
    tracemalloc.start()
    try:
        assert len(batches(text, 20, sequence=256)) == 20
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 1 << 20


@pytest.mark.parametrize("content", [None, {"a": b""}, {"a": b"\0"}])
def test_a_folder_without_text_is_refused_by_name(tmp_path, content):
    write(tmp_path, **(content or {}))
    with pytest.raises(TextError, match=str(tmp_path)):
        Text(str(tmp_path))


def test_a_device_is_no_text():
    with pytest.raises(TextError, match="/dev/zero is neither a file nor a folder"):
        Text("/dev/zero")


def test_a_text_shorter_than_a_sequence_is_refused_with_the_numbers(tmp_path):
    text = Text(write(tmp_path, a=b"1234567"))
    with pytest.raises(TextError, match="has 7 B, less than one sequence of 8"):
        batches(text)


def test_a_file_cut_during_training_is_named(tmp_path):
    text = Text(write(tmp_path, a=b"12345678") + "/a")
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(TextError, match=f"{tmp_path}/a has become shorter"):
        text.read(0, 8)


def test_the_default_text_is_the_standard_library():
    text = default_text()
    assert text.files > 500
    assert text.nbytes > 5_000_000
