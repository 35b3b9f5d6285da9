"""Types that a device does not compute in. Faked: torch's refusal."""

import pytest
import torch

import infinity


def test_a_type_that_the_device_does_not_compute_in_is_refused_before_anything_moves(folder, monkeypatch):
    def refused(*_):
        raise RuntimeError("\"addmm_impl\" not implemented for 'BFloat16'")

    monkeypatch.setattr("infinity.device.computing.torch.mm", refused)
    with (
        pytest.raises(
            infinity.UnsupportedError, match=r"cpu does not compute in bfloat16: .*not implemented"
        ),
        infinity.Init(nvme=str(folder), host_memory="16MiB"),
    ):
        torch.nn.Linear(4, 4)
    assert list(folder.iterdir()) == []
