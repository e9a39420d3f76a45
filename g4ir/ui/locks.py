"""Locks between processes on open files: flock(2), or LockFileEx on Windows."""

from __future__ import annotations

import sys

#: kinds of locks, and the flag for not waiting, with the values of flock(2)
SHARED, EXCLUSIVE, AT_ONCE = 1, 2, 4

if sys.platform != "win32":
    from fcntl import flock as flock
else:
    import ctypes
    import msvcrt
    from ctypes import wintypes

    #: LockFileEx: https://learn.microsoft.com/windows/win32/api/fileapi/nf-fileapi-lockfileex
    KERNEL = ctypes.WinDLL("kernel32", use_last_error=True)
    FAIL_IMMEDIATELY, EXCLUSIVE_LOCK = 1, 2
    LOCK_VIOLATION, IO_PENDING = 33, 997

    class Overlapped(ctypes.Structure):
        """Win32's OVERLAPPED, of which a lock uses the offset of the locked bytes. `flock` sets it
        beyond the file's content, since other processes cannot read locked bytes."""

        _fields_ = [
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        ]

    def flock(file: int, kind: int) -> None:
        """Lock an open file until it is closed; `kind`: SHARED or EXCLUSIVE, with AT_ONCE it does
        not wait: BlockingIOError if another process's lock excludes it. OSError if the file cannot
        be locked."""
        flags = (kind & EXCLUSIVE and EXCLUSIVE_LOCK) | (kind & AT_ONCE and FAIL_IMMEDIATELY)
        handle, begin = wintypes.HANDLE(msvcrt.get_osfhandle(file)), Overlapped(offset_high=1 << 30)
        if not KERNEL.LockFileEx(handle, flags, 0, 1, 0, ctypes.byref(begin)):
            error = ctypes.get_last_error()
            if error in (LOCK_VIOLATION, IO_PENDING):
                raise BlockingIOError(f"locked (Windows error {error})")
            raise OSError(f"cannot be locked (Windows error {error})")
