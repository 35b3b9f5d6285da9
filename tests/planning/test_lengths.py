"""The schedules of a warm-up by sequence length. Trusted: the digests below, of what DeepSpeed 0.19.8's
CurriculumScheduler.update_difficulty returned for the steps 1 to 10,000.
"""

import hashlib

import pytest

from infinity.errors import ConfigError
from infinity.planning.lengths import LengthSchedule

DEEPSPEED = {
    "linear": (
        {"shortest": 8, "longest": 1024, "steps": 7000, "multiple": 8},
        ("4914cb7c9b648521", 6656512),
    ),
    "linear uneven": (
        {"shortest": 60, "longest": 1000, "steps": 3333, "multiple": 48},
        ("b8d3069f4cc3294e", 8358744),
    ),
    "root": (
        {
            "schedule": "fixed_root",
            "shortest": 64,
            "longest": 2048,
            "steps": 9000,
            "multiple": 16,
            "degree": 2,
        },
        ("e527ef4c33d6e100", 14456752),
    ),
    "cube root": (
        {
            "schedule": "fixed_root",
            "shortest": 24,
            "longest": 4096,
            "steps": 20000,
            "multiple": 8,
            "degree": 3,
        },
        ("4463fb4aa5621655", 24441208),
    ),
    "discrete": (
        {
            "schedule": "fixed_discrete",
            "shortest": 16,
            "longest": 512,
            "lengths": [16, 128, 96, 512, 64],
            "until": [10, 999, 2500, 6000],
        },
        ("f00d1f25b06e2b4e", 4110848),
    ),
    "custom": (
        {
            "schedule": "custom",
            "shortest": 8,
            "longest": 999,
            "function": lambda step: min(8 + step * step // 50000, 1200),
        },
        ("48e500860b3adf9f", 5336495),
    ),
}
"""By name: the options, then the first digits of the SHA-256 of all lengths and their sum."""


@pytest.mark.parametrize("name", DEEPSPEED)
def test_the_lengths_of_ten_thousand_steps_are_deepspeeds(name):
    options, (digest, total) = DEEPSPEED[name]
    schedule = LengthSchedule(**options)
    lengths, length = [], schedule.shortest
    for step in range(1, 10_001):
        length = schedule.after(length, step)
        lengths.append(length)
    assert sum(lengths) == total
    assert hashlib.sha256(",".join(map(str, lengths)).encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "linear"}, "schedule='linear': expected one of 'fixed_linear'"),
        ({}, "schedule='fixed_linear' needs steps=..."),
        ({"steps": 0}, "steps=0: expected a number above 0"),
        ({"steps": 1.5}, "steps=1.5: expected a whole number"),
        ({"steps": 5, "degree": 2}, "degree=2: schedule='fixed_linear' takes no degree"),
        ({"steps": 5, "shortest": 64}, "shortest=64 is above longest=32"),
        ({"schedule": "fixed_root", "steps": 5}, "needs degree=..."),
        ({"schedule": "fixed_discrete", "lengths": [8, 16], "until": [1, 2]}, "one length more than steps"),
        ({"schedule": "fixed_discrete", "lengths": [8, 16, 32], "until": [2, 1]}, "expected steps that grow"),
        ({"schedule": "custom"}, "needs function=..."),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, says):
    with pytest.raises(ConfigError) as error:
        LengthSchedule(**{"shortest": 8, "longest": 32, **options})
    assert says in str(error.value)
