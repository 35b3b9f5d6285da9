"""Where things are: the repository, the programs that tests start, a folder on a real disk; and the seed."""

import os
import tempfile
from pathlib import Path

SEED = int(os.environ.get("INFINITY_TEST_SEED", "2104"), 0)
SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


def filesystem(folder: Path) -> str:
    """Name the type of the filesystem that holds a folder."""
    best, kind = 0, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4])
        if folder.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


def disk() -> Path:
    """Find a writable folder whose files are not in memory; the last resort is one whose files are."""
    named = os.environ.get("INFINITY_TEST_DISK")
    places = [named, tempfile.gettempdir(), "/var/tmp", ROOT / "build"]  # noqa: S108
    folders = [Path(place).resolve() for place in places if place]
    folders[-1].mkdir(exist_ok=True)
    writable = [folder for folder in folders if os.access(folder, os.W_OK)]
    on_disk = [folder for folder in writable if filesystem(folder) not in IN_MEMORY]
    return next(iter([*on_disk, *writable]))
