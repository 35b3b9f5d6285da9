"""What bench.gpu reads out of a profile. Trusted: the form in which torch.profiler exports a trace."""

import pytest

from infinity.bench.device.gpu import DOWN, UP, common, merged, profile_of


def event(category, name, start_us, end_us, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": end_us - start_us, "args": args}


def test_copies_are_counted_by_direction_and_by_the_kernels_beside_them():
    trace = [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "Memcpy HtoD (Pinned -> Device)", 0, 1000, bytes=1),
        event("kernel", "gemm", 100, 200),
        event("kernel", "softmax", 150, 300),
        event("gpu_memset", "Memset (Device)", 0, 1000, bytes=1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 1000, bytes=1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 150, bytes=3000),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 250, 350, bytes=70),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 400, 500, bytes=500),
    ]
    profile = profile_of(trace)
    found = profile.copies
    assert profile.kernels_s == pytest.approx(200e-6)
    assert found[UP].nbytes == 3070
    assert found[UP].pageable_nbytes == 70
    assert found[UP].seconds == pytest.approx(250e-6)
    assert found[UP].beside_s == pytest.approx(100e-6)
    assert found[UP].bytes_per_s == pytest.approx(3070 / 250e-6)
    assert found[DOWN].nbytes == 500
    assert found[DOWN].beside_s == 0


def test_a_trace_without_copies_has_none():
    assert profile_of([event("kernel", "gemm", 0, 10)]).copies[UP].bytes_per_s == 0


def test_spans_that_touch_become_one():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert common([(0, 4), (5, 6)], [(1, 2), (3, 5.5)]) == 2.5
    assert common([], [(0, 1)]) == 0
