"""Whether OpenMP's threads sleep while they have nothing to do: [Note: threads that spin] in openmp.c."""

from infinity.kernels.library import library


class SleepingThreads:
    """Has the threads of GNU's libgomp sleep between operations, while `set` says so, or others do."""

    def __init__(self) -> None:
        """Leave them as they are."""
        self._asked = False

    def set(self, *, asked: bool) -> None:
        """Have them sleep from now on, or no more."""
        if asked != self._asked:
            library.infinity_let_sleep(1 if asked else -1)
            self._asked = asked

    def __del__(self) -> None:
        """Ask no more."""
        self.set(asked=False)


def sleep() -> bool:
    """Return whether they do: False where nobody asks, or where another library runs OpenMP's threads."""
    return bool(library.infinity_let_sleep(0))
