"""QLoRA's recipe at the size of a real model: a base of 1.1B parameters in nf4, within 256 MiB. Trusted: the
kernel's count of resident memory. Bits are compared on small models, in tests/huggingface/test_peft.py.
"""

import json

import pytest

from launches import python
from places import SUPPORT

pytest.importorskip("peft")
pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")

pytestmark = [pytest.mark.disk, pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20


def test_a_step_of_lora_on_a_base_of_1b_in_nf4_reads_its_packed_bytes_twice_and_writes_none(folder):
    ended = python(SUPPORT / "qlora_run.py", folder, folder=folder, limit_s=800)
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = json.loads(ended.stdout.splitlines()[-1])
    parameters, passes = said["parameters"], 2
    assert parameters > 1_000_000_000
    assert said["loading"] == said["written"] == 0
    packed = said["packed"]
    assert 0.5 * parameters < packed < 0.7 * parameters  # embeddings and head are in 16 bits
    assert max(said["read"]) <= passes * packed * 1.02
    for read in said["read"][1:]:  # what the budget holds, it holds after the first
        assert 0.4 * parameters < read / passes <= 0.6 * parameters
    # Adapters, their gradients and moments are in ordinary memory, as are units in use: two at most.
    assert said["peak"] <= 256 * MIB + 16 * said["adapters"] + 2 * said["largest"] + 64 * MIB
