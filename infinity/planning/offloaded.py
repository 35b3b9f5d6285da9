"""How much of a planned training's activations goes to NVMe. Pure."""

from __future__ import annotations

from infinity.errors import HostMemoryError
from infinity.planning.activations import Usage
from infinity.planning.setting import Setting
from infinity.sizes import format_size


def offloaded_nbytes(used: Usage | None, setting: Setting, room_nbytes: int) -> int:
    """Return the bytes of activations that find no room in host memory, and go to NVMe; the newest stays.

    Raises: HostMemoryError where there is no NVMe.
    """
    if used is None or setting.method.activation_nbytes is not None:
        return used.on_nvme_nbytes if used is not None else 0
    leaving = used.leaving_nbytes
    nbytes = leaving if setting.method.offload == "nvme" else max(0, leaving - room_nbytes)
    if nbytes and not setting.nvme:
        raise HostMemoryError(
            f'offload_activations="host": {format_size(leaving)} of activations on each rank, and '
            f"host_memory={format_size(setting.host_nbytes)} leaves "
            f"{format_size(max(0, room_nbytes))} for them. Give "
            f"{format_size(setting.local_ranks * nbytes)} more, or plan with NVMe."
        )
    return nbytes
