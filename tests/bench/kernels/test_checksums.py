"""The checksums that are compared: values known from elsewhere. The C compiler is real; no clock is asked."""

import shutil

import pytest
import torch
import xxhash

from infinity.bench.kernels import checksums
from infinity.errors import ConfigError

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
def test_what_is_compared_is_crc32c(tmp_path):
    ffi, library = checksums.compiled(str(tmp_path))
    for value, expected in ((0, 0x8A9136AA), (0xFF, 0x62A8AB43)):  # RFC 3720, B.4: 32 bytes of each
        content = ffi.new("uint8_t[]", bytes([value]) * 32)
        assert library.crc32c_one(content, 32) == expected


@needs_compiler
def test_every_checksum_depends_on_every_part_of_the_content(tmp_path):
    content = torch.arange(96, dtype=torch.int8).numpy()
    ways = dict(checksums.contestants(*checksums.compiled(str(tmp_path)), content.data))
    assert ways["xxh3, 64 bits"]() == xxhash.xxh3_64_intdigest(content.tobytes())
    before = {name: call() for name, call in ways.items()}
    for at in range(96):
        content[at] += 1
        assert all(call() != before[name] for name, call in ways.items()), at
        content[at] -= 1


def test_without_a_compiler_the_cure_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(ConfigError, match="a C compiler and an x86-64 CPU are needed"):
        checksums.compiled(str(tmp_path))
