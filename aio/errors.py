"""The errors of files and engines. Their texts say what, where, numbers, likely cause and cure."""

import errno
import os
from typing import NamedTuple

from infinity.aio.library import BLOCK, END_OF_FILE


class Advice(NamedTuple):
    """The usual cause of an errno, and what to do about it."""

    cause: str
    cure: str


STARTING, TRYING = "starting it", "a trial write and read"
"""The steps of opening an engine, at which it may fail."""

_UNKNOWN = Advice("unknown; the system's log may say more", "look at `dmesg`")

_OF_REQUESTS = {
    errno.EIO: Advice(
        "the drive, or the network behind the file system, failed at this place",
        "look at `dmesg` and `smartctl -a`; move `nvme` to another drive",
    ),
    errno.ENOSPC: Advice(
        "the file system, or the thin volume under it, is full although the space had been promised",
        "free space there, or move `nvme` to another drive",
    ),
    errno.EDQUOT: Advice("this user's quota is used up", "raise the quota, or move `nvme` elsewhere"),
    errno.EFBIG: Advice(
        "the file would pass the limit on file sizes (RLIMIT_FSIZE, or the file system's own)",
        "`ulimit -f unlimited`, or a file system that takes larger files",
    ),
    errno.EINVAL: Advice(
        f"the device wants larger alignment than {BLOCK} B, or the file system refuses O_DIRECT here",
        "INFINITY_AIO=buffered",
    ),
    errno.EBADF: Advice("other code closed the file", "close files only through File.close"),
    errno.EFAULT: Advice(
        "the memory was freed before the request ended, or is not readable",
        "pass whatever holds the memory as `owner`",
    ),
    errno.ENOMEM: Advice("the kernel is out of memory", "lower `host_memory`, or the engine's depth"),
    errno.EAGAIN: Advice(
        "the device or the kernel stayed too busy for many tries", "lower the engine's depth"
    ),
    errno.EINTR: Advice("a debugger or a file system interrupted every try", "run without it"),
    errno.EROFS: Advice(
        "the kernel remounted the file system read-only after an error", "look at `dmesg`; run fsck"
    ),
    errno.ENODATA: Advice("a medium error: these blocks are lost", "replace the drive"),
    errno.ENODEV: Advice("the drive vanished", "look at `dmesg`"),
    errno.ENXIO: Advice("the drive vanished", "look at `dmesg`"),
    errno.ECANCELED: Advice("the kernel cancelled the request", "look at `dmesg`"),
    errno.EPERM: Advice("the file is immutable or sealed", "`lsattr` on its folder"),
    errno.EACCES: Advice("this user may not write there", "check the folder's owner and mode"),
    errno.EMFILE: Advice("too many open files", "`ulimit -n` higher"),
    errno.ESTALE: Advice("the network file system lost the file", "use a local drive"),
}

FLUSH = "flush"
"""The verb of a flush's error."""

_OF_FLUSHES = {
    errno.EIO: Advice(
        "the drive, or the network behind the file system, failed; or another program (a backup, a scanner) "
        "read this file while it was written, which the kernel counts as a failure of direct I/O: `dmesg` "
        "then has 'Page cache invalidation failure'",
        "look at `dmesg` and `smartctl -a`; keep other programs out of the folder while a run writes there, "
        "or move `nvme` to another drive",
    ),
}

_OF_ENGINES = {
    errno.EPERM: Advice(
        "kernel.io_uring_disabled is 2 (or 1), or a container profile filters io_uring",
        "`sysctl kernel.io_uring_disabled=0`, or run the container with a profile that allows io_uring",
    ),
    errno.EACCES: Advice(
        "a security module (SELinux, AppArmor) forbids io_uring", "allow io_uring in its policy"
    ),
    errno.ENOSYS: Advice(
        "the kernel has no io_uring (gVisor, or old), or a container profile hides it",
        "Linux 5.11 or newer, or a profile that allows io_uring",
    ),
    errno.ENOTSUP: Advice(
        "this build has no io_uring, or the kernel's lacks what is needed",
        "install liburing-dev and build again; or Linux 5.11 or newer",
    ),
    errno.EINVAL: Advice(
        "the file system does not take O_DIRECT, or not with 4096 B alignment", "kind='buffered'"
    ),
    errno.ENOMEM: Advice("RLIMIT_MEMLOCK is too low for a ring", "`ulimit -l unlimited`, or a lower depth"),
    errno.EMFILE: Advice("too many open files", "`ulimit -n` higher"),
    errno.EAGAIN: Advice("too many threads or processes", "`ulimit -u` higher, or fewer threads"),
}


def name_of(number: int) -> str:
    """Describe an errno, with its symbol in parentheses."""
    if number == END_OF_FILE:
        return "end of file"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def why_not_registered(number: int) -> str:
    """Describe why memory could not be registered, and what to do about it."""
    cures = {
        errno.ENOMEM: "RLIMIT_MEMLOCK is too low for it; `ulimit -l` higher",
        errno.ENOTSUP: "Linux 5.13 or newer could",
    }
    return f"{name_of(number)}; {cures.get(number, 'it only costs some CPU time')}"


class _DetailedError(OSError):
    """An OSError whose text is its whole message, without `[Errno 5]` in front."""

    def __str__(self) -> str:
        return str(self.strerror)


class IoError(_DetailedError):
    """A read or write failed for good.

    Attributes:
        errno: as the kernel reported it; EIO at the end of a file.
        filename: the file, for a nameless one its folder.
        offset: in bytes, in the file, where the request starts.
        nbytes: of the request.
        failed_at: in bytes, in the file, where the first failure was.
        what: the caller's name of the bytes, such as the unit and field.
        cause: the likely cause.
        cure: what to try.
    """

    offset: int = 0
    nbytes: int = 0
    failed_at: int = 0
    what: str = ""
    cause: str = ""
    cure: str = ""

    @classmethod
    def of_request(
        cls, number: int, verb: str, path: str, *, offset: int, nbytes: int, failed_at: int, what: str
    ) -> "IoError":
        """Compose the error of one request; `number` is an errno or END_OF_FILE."""
        if number == END_OF_FILE:
            advice = Advice(
                "the file is shorter than the request: it was never written there, or was truncated",
                "allocate and write before reading; let no other program change the file",
            )
        else:
            of_verb = {**_OF_REQUESTS, **(_OF_FLUSHES if verb == FLUSH else {})}
            advice = of_verb.get(number, _UNKNOWN)
        error = cls(
            errno.EIO if number == END_OF_FILE else number,
            f"{verb} of {what or 'unnamed data'}: {name_of(number)}\n"
            f"  where: {path}, {nbytes} B at offset {offset}, failed at {failed_at}\n"
            f"  likely cause: {advice.cause}\n"
            f"  try: {advice.cure}",
            path,
        )
        error.offset, error.nbytes, error.failed_at, error.what = offset, nbytes, failed_at, what
        error.cause, error.cure = advice
        return error


class IoTimeoutError(_DetailedError, TimeoutError):
    """A request did not end within the time given to `wait`.

    It is still in flight: its memory stays with the engine until the kernel is done with it.
    """

    @classmethod
    def of_hang(cls, what: str, seconds: float, in_flight: "list[str]") -> "IoTimeoutError":
        """Compose the error of a disk that does not respond. in_flight: its pending requests."""
        shown = in_flight[:8] + ([f"and {len(in_flight) - 8} more"] if len(in_flight) > 8 else [])
        return cls(
            errno.ETIMEDOUT,
            f"the disk does not answer: {what} has been waiting for {seconds:.0f} s\n"
            f"  in flight: {'; '.join(shown)}\n"
            "  likely cause: the drive, or the network behind the file system, hangs, or the file system is "
            "frozen (fsfreeze)\n"
            "  try: look at `dmesg`; a larger INFINITY_IO_TIMEOUT, in seconds, if the drive is only slow",
        )


class StorageFullError(_DetailedError):
    """A file system has too little space for an allocation.

    Attributes:
        needed: bytes of the allocation.
        free: bytes available to this user there.
    """

    needed: int = 0
    free: int = 0

    def with_sizes(self, *, needed: int, free: int) -> "StorageFullError":
        """Set the bytes that are needed and free; return the error."""
        self.needed, self.free = needed, free
        return self

    @classmethod
    def of_file(cls, number: int, path: str, *, needed: int, free: int) -> "StorageFullError":
        """Compose the error of one allocation."""
        advice = _OF_REQUESTS[number]
        cause = "other data fills the file system" if number == errno.ENOSPC else advice.cause
        cure = "free space there, or let `nvme` name another drive" if number == errno.ENOSPC else advice.cure
        short = f", {needed - free} B short" if needed > free else ""  # with a quota there may be enough
        error = cls(
            number,
            f"allocating {needed} B: {name_of(number)}\n"
            f"  where: {path}, {free} B free{short}\n"
            f"  likely cause: {cause}\n"
            f"  try: {cure}",
            path,
        )
        error.needed, error.free = needed, free
        return error


class EngineUnavailableError(_DetailedError):
    """An engine cannot be started, or does not work on the files of a folder."""

    kind: str = ""

    @classmethod
    def of_kind(cls, kind: str, number: int, doing: str, path: str) -> "EngineUnavailableError":
        """Compose the error of one kind of engine. doing: the step that failed."""
        starting = doing == STARTING
        advice = (_OF_ENGINES if starting or number == errno.EINVAL else _OF_REQUESTS).get(number, _UNKNOWN)
        error = cls(
            number,
            f"engine {kind} is not available: {doing}: {name_of(number)}\n"
            f"  where: {path}\n"
            f"  likely cause: {advice.cause}\n"
            f"  try: {advice.cure}",
            path,
        )
        error.kind = kind
        return error


class IoEngineFailedError(_DetailedError):
    """The engine failed while it was running.

    Requests that had not started have failed. Those that the kernel had are in flight for ever, and their
    memory is never reused.
    """

    @classmethod
    def of_engine(cls, number: int) -> "IoEngineFailedError":
        """Compose the error from an errno."""
        return cls(number, f"the I/O engine failed: {name_of(number)}\n  try: look at `dmesg`; start again")


class EngineClosedError(RuntimeError):
    """The engine was used after `close`."""


class ForkedError(RuntimeError):
    """The engine was used in a forked child: its threads and its ring live in the parent only."""
