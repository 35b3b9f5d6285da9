"""Training on the simulated device: late copies, late kernels, every access checked, and the recipe's bits.

Trusted: the reference recipe in memory, and the simulator, which test_simulated_faults tests. It proves order
and bits, and nothing of CUDA's own interface or of speed.
"""

import pytest

import simulated
import simulated_cases

pytestmark = [pytest.mark.disk, pytest.mark.multi]

DEFAULT = ["llama, jitter", "clipped, 0.2 ms", "offloaded, 0.2 ms", "reentrant, 0.2 ms"]


def others(delay):
    """The cases with this delay that the default ones leave."""
    named = [f"{base}, {delay}" for base in simulated_cases.BASES]
    return [name for name in named if name not in DEFAULT]


def assert_exact(names):
    """Run cases: their losses and weights are the recipe's, without a race; copies and kernels were late."""
    for name, said in simulated.results(*names).items():
        assert (said["killed"], said["raised"], said["failure"]) == ("", "", ""), name
        assert (said["losses"], said["different"]) == (True, []), name
        assert min(said["late_copies"], said["late_kernels"]) > 0, name


def test_training_with_late_copies_and_kernels_has_the_bits_of_the_recipe():
    assert_exact(DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("delay", simulated_cases.DELAYS)
def test_every_case_has_the_bits_of_the_recipe_at_every_delay(delay):
    assert_exact(others(delay))
