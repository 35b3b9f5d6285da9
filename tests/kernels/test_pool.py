"""Trusted: the kernels' results on one thread. Faked: nothing; real threads, forks and processes."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from children import ended
from covers import examples
from infinity import kernels

N = 1 << 20


@pytest.fixture(autouse=True)
def _two_threads():
    kernels.set_threads(2)


def squares(grad):
    return kernels.sum_squares(len(grad), grad.data_ptr(), "f32")[0]


def test_concurrent_callers_get_the_results_they_would_get_alone():
    grads = [torch.randn(N, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    expected = [squares(grad) for grad in grads]
    found = [[] for _ in grads]

    def call(index):
        found[index].extend(squares(grads[index]) for _ in range(40))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(grads))]
    for caller in callers:
        caller.start()
    for threads in (3, 1, 4, 2):  # the pool may change under them
        kernels.set_threads(threads)
        time.sleep(0.002)
    for caller in callers:
        caller.join()
    assert [[value] * 40 for value in expected] == found


def test_a_call_lets_other_python_threads_run():
    source, target = (torch.zeros(256 << 20, dtype=torch.uint8) for _ in range(2))
    began, seen, stop, counted = threading.Event(), [0], threading.Event(), 0

    def count():
        while not stop.is_set():
            began.set()
            seen[0] += 1
            time.sleep(0)  # lets others run

    counter, usual_s = threading.Thread(target=count), sys.getswitchinterval()
    counter.start()
    began.wait()
    kernels.set_threads(1)
    sys.setswitchinterval(100.0)  # no thread has to let others run: one that does, does so by itself
    try:
        for _ in range(20):  # the other thread may get no core while one call lasts
            before = seen[0]
            kernels.copy(len(source), target.data_ptr(), source.data_ptr())
            counted = seen[0] - before
            if counted > 100:
                break
    finally:
        sys.setswitchinterval(usual_s)
        stop.set()
        counter.join()
    assert counted > 100


def in_child(work):
    """Fork; return what the child's work gives."""
    # CPython 3.12 and later warn that a process with threads forks: that is what is tested here.
    return ended(lambda say: say(gives=work()))["gives"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own_and_the_parent_keeps_his():
    grad = torch.randn(N)
    expected = squares(grad)

    def work():
        same = squares(grad) == expected
        kernels.set_threads(3)
        return same and squares(grad) == expected

    assert in_child(work)
    assert in_child(lambda: in_child(work))
    assert expected == squares(grad)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forking_while_other_threads_are_inside_kernels_never_hangs():
    grad = torch.randn(N)
    expected = squares(grad)
    stop = threading.Event()

    def keep_busy():
        while not stop.is_set():
            squares(grad)

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        results = [in_child(lambda: squares(grad) == expected) for _ in range(examples(6, 15))]
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert all(results)


def workers():
    """Return the CPUs of every thread of this process that is none of Python's."""
    python = {thread.native_id for thread in threading.enumerate()}
    found = {}
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found[int(path.name)] = os.sched_getaffinity(int(path.name))
    return {task: cpus for task, cpus in found.items() if task not in python}


def test_bound_threads_run_on_those_cpus_alone_and_the_caller_where_it_likes():
    mine = os.sched_getaffinity(0)
    grad = torch.randn(N)
    expected = squares(grad)
    kernels.set_threads(1)
    before = set(workers())
    kernels.set_threads(3)
    try:
        for cpus in ([max(mine)], sorted(mine), [min(mine)]):
            kernels.bind_threads(cpus)
            assert squares(grad) == expected
            new = {tid: on for tid, on in workers().items() if tid not in before}
            assert list(new.values()) == [set(cpus)] * 2
            assert os.sched_getaffinity(0) == mine
        kernels.bind_threads([])
        assert squares(grad) == expected
        assert [on for tid, on in workers().items() if tid not in before] == [mine] * 2
    finally:
        kernels.bind_threads([])


def test_cpus_that_are_not_the_processs_are_refused_by_number():
    for cpus in ([4095], [-1]):
        with pytest.raises(ValueError, match=str(cpus[0])):
            kernels.bind_threads(cpus)


def in_fresh_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_infinity_isa_forces_an_instruction_set():
    result = in_fresh_python("from infinity import kernels; print(kernels.isa())", INFINITY_ISA="scalar")
    assert result.stdout.strip() == "scalar", result.stderr


def test_an_instruction_set_that_does_not_exist_is_refused_by_name():
    result = in_fresh_python("from infinity import kernels", INFINITY_ISA="sse9")
    assert result.returncode == 1
    assert "UnsupportedIsaError: 'sse9' is not an instruction set" in result.stderr
    assert "try: INFINITY_ISA=scalar" in result.stderr


def test_a_process_with_a_running_pool_ends_cleanly():
    code = (
        "from infinity import kernels\n"
        "import array\n"
        "kernels.set_threads(4)\n"
        "values = array.array('f', bytes(4 << 20))\n"
        "print(kernels.sum_squares(1 << 20, values.buffer_info()[0], 'f32'))\n"
    )
    results = [in_fresh_python(code) for _ in range(3)]
    assert [(r.returncode, r.stdout.strip(), r.stderr) for r in results] == [(0, "(0.0, True)", "")] * 3
