"""What is put together in host memory before it goes to an accelerator. Faked: the accelerator, whose memory
is the host's. Trusted: the same values, widened at once.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.engine import layouts
from infinity.lane.direct import fetch_of
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.layout import RecordSchema, lay_out
from infinity.records.record import Record, Traffic
from infinity.storage.checkpoint_store import CheckpointStore
from infinity.storage.memory import Pool, view
from infinity.storage.packed import MX_BLOCK, FileRange, Stack4
from infinity.storage.store import DONE
from infinity.timeline import Timeline

TILE = 4096


class Elsewhere(CpuDevice):
    """Computes in other memory than the host's, which happens to be beside it."""

    def __init__(self):
        super().__init__()
        self.is_host = False

    def upload(self, flat, start, address, numel):
        nbytes = numel * flat.itemsize
        view(flat.data_ptr() + start * flat.itemsize, nbytes)[:] = view(address, nbytes)
        return DONE


@pytest.mark.disk
@pytest.mark.parametrize("share", ["room", "no room"])
def test_what_its_file_has_transposed_goes_to_an_accelerator_in_one_reading_where_there_is_room(
    folder, share
):
    rows, cols, count = 512, 512, 2
    codes, scales = rows * cols // 2 * count, rows * cols // MX_BLOCK * count
    path, noise = folder / "stack", random.Random(5)
    path.write_bytes(noise.randbytes(codes) + bytes(noise.randrange(110, 130) for _ in range(scales)))
    weight = Stack4(FileRange(str(path), 0, codes), FileRange(str(path), codes, scales), rows, cols)
    store, device, traffic = CheckpointStore(kind="threads"), Elsewhere(), Traffic()
    record = Record(lay_out([("p", (weight.numel,))], TILE), TILE, traffic, schema=RecordSchema("fp32"))
    record.lie_in(store, [weight])
    flat, outgoing = torch.zeros(record.shard.numel, dtype=torch.bfloat16), OutgoingShare(device, Timeline())
    outgoing.open(2 * weight.numel + (1 << 16) if share == "room" else TILE)
    lane = StreamLane(Pool(TILE * 16, 3))
    job = fetch_of(
        SimpleNamespace(record=record, base=0, flat=flat, framed=False, pending=None), device, TILE, outgoing
    )
    lane.submit(job)
    lane.wait(job, finished=True)
    tensors = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)]
    (there,) = [FileRange("0", 0, codes + scales)]
    same = Stack4(there.part(0, codes), there.part(codes, scales), rows, cols)
    expected = layouts.widened(same, tensors, torch.Size([weight.numel]), torch.bfloat16)
    assert torch.equal(flat[: weight.numel], expected)
    packed = codes + scales
    read = traffic.read["checkpoint", "hi"]
    assert packed <= read < 1.3 * packed if share == "room" else read > 8 * packed
    assert outgoing.held_nbytes == 0
    store.close()
