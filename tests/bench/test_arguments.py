"""What options may be. Trusted: argparse, which prints why a value is refused. Faked: nothing."""

import argparse

import pytest

from infinity.bench.aio import io
from infinity.bench.arguments import positive, size_of, some_size
from infinity.bench.device import copy
from infinity.bench.durable import durability
from infinity.bench.engine import step
from infinity.bench.planning import plan as planning
from infinity.bench.tiling import tiles


def test_sizes_and_counts_are_read():
    assert (size_of("4MiB"), size_of("0"), some_size("1"), positive("3")) == (4 << 20, 0, 1, 3)


@pytest.mark.parametrize(
    ("read", "text", "why"),
    [
        (size_of, "3MiB+1", "not a size"),
        (some_size, "0 GiB", "at least one byte"),
        (some_size, "much", "not a size"),
        (positive, "0", "whole number, at least 1"),
        (positive, "1.5", "whole number, at least 1"),
        (positive, "-1", "whole number, at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(read, text, why):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text[0]}.*{why}"):
        read(text)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (io, "--size"),
        (io, "--request"),
        (io, "--piece"),
        (step, "--disk-size"),
        (step, "--host-memory"),
        (tiles, "--within"),
        (copy, "--size"),
        (copy, "--file-size"),
        (planning, "--host-memory"),
        (planning, "--tile-above"),
    ],
)
def test_every_option_for_a_size_tells_what_is_wrong_with_it(command, option, capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([*(["check"] if command is planning else []), option, "3MiB+1"])
    assert f"argument {option}: size: '3MiB+1' is not a size" in capsys.readouterr().err


def test_the_one_of_the_durable_runs_too(capsys):
    with pytest.raises(SystemExit):
        durability.main(["--nvme", ".", "--disk-size", "3MiB+1"])
    assert "argument --disk-size: size: '3MiB+1' is not a size" in capsys.readouterr().err
