"""Run a command with io_uring refused, as container profiles do: seccomp_run.py EPERM|ENOSYS command ..."""

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_GE, JUMP_GT, RETURN = 0x20, 0x35, 0x25, 0x06
RETURN_ERRNO, RETURN_ALLOW = 0x00050000, 0x7FFF0000
FIRST, LAST = 425, 427  # io_uring_setup, _enter and _register, on every architecture


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def instruction(code, value, if_true=0, if_false=0):
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(number):
    """Install the filter: the three system calls fail with `number`, here and in every child."""
    code = b"".join(
        (
            instruction(LOAD_WORD, 0),
            instruction(JUMP_GE, FIRST, 0, 2),
            instruction(JUMP_GT, LAST, 1, 0),
            instruction(RETURN, RETURN_ERRNO | number),
            instruction(RETURN, RETURN_ALLOW),
        )
    )
    program = Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
