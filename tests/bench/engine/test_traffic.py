"""What a step moves and holds, counted by the kernel: a Llama of over 75M parameters on the real disk."""

import json

import pytest

from launches import python

pytestmark = [pytest.mark.slow, pytest.mark.disk, pytest.mark.timeout(600)]

LAYERS = 6
BLOCK = 4 * 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
"""Decoder layers, and the parameters of one."""

TRAIN = """
import json, sys
import psutil, torch, transformers
import infinity
nvme, memory, layers, update, micro_batches = sys.argv[1:]

def moved():
    lines = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])

before = psutil.Process().memory_info().rss
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is that of the process that forked this one
with infinity.Init(nvme=nvme, host_memory=memory):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=int(layers), num_attention_heads=16))
optimizer = infinity.AdamW(model.parameters(), lr=1e-4, update=update)
if micro_batches == "none":
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 256, (1, 64))
else:
    infinity.tiling.tile_batch_(model, 1)
    infinity.tiling.tile_loss_(model)
    ids = torch.randint(0, 256, (int(micro_batches), 64 // int(micro_batches)))
steps = []
for _ in range(6):
    start = moved()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps.append(moved() - start)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps([model.num_parameters(), steps, peak - before]))
"""


@pytest.mark.parametrize(
    ("update", "micro_batches", "limit"),
    [
        ("backward", "none", 26.5),
        ("forward", "none", 30.5),
        ("backward", "1", 26.5),
        ("backward", "8", 26.5),
    ],
)
def test_a_step_moves_no_more_than_it_must_and_stays_in_its_budget(
    folder, tmp_path, update, micro_batches, limit
):
    # in which nothing worth the name can be pinned
    command = ["-c", TRAIN, folder, "16MiB", LAYERS, update, micro_batches]
    done = python(*command, folder=tmp_path, TQDM_DISABLE=1)
    assert done.returncode == 0, done.stderr
    parameters, steps, peak = json.loads(done.stdout.splitlines()[-1])
    assert parameters > 75_000_000
    # The third step may make two updates: that of the second with its fetches, and its own in the backward.
    assert sum(steps[3:]) / 3 / parameters <= limit
    activations = 100 << 20  # of a plain run at these tokens, without parameters and gradients
    expected = (16 << 20) + 3 * 4 * BLOCK + activations + (200 << 20)
    if micro_batches == "8":
        # One block's sums in fp32, beside what one micro-batch takes; the boundaries.
        expected += 4 * BLOCK + LAYERS * 64 * 1024 * 2
    assert peak <= expected
