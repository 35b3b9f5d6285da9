"""What tests of Accelerate share."""

import pytest


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps its settings in the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
