"""System calls that finish what they begin: whole writes, whole reads, real syncs.

Only `OSError` leaves this module; callers turn it into an error with a key. Spec: 02-store.
"""

from __future__ import annotations

import errno
import functools
import os
import sys

# Linux moves at most 0x7ffff000 bytes a call and says so in the result; macOS refuses more than
# 2^31 - 1. Both are below this.
PIECE_NBYTES_MAX = 1 << 30

# What open must not do: follow a link planted at the last step, hang on a FIFO, survive an exec.
READ_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
CREATE_FLAGS = (
    os.O_RDWR
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)

_NETWORK = {
    # name -> how stale a listing may be, in seconds; None where it cannot be known
    "nfs": 120.0,
    "nfs4": 120.0,
    "cifs": 120.0,
    "smb3": 120.0,
    "smbfs": 120.0,
    "lustre": 0.0,
    "ceph": 0.0,
    "gpfs": 0.0,
    "beegfs": 0.0,
    "wekafs": 0.0,
    "ocfs2": 0.0,
    "gfs2": 0.0,
    "orangefs": None,
    "pvfs2": None,
    "glusterfs": None,
    "afs": None,
    "9p": None,
    "davfs": None,
    "fuse": None,
}


def pwrite_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` at `offset`. A call that writes a part is continued."""
    done, nbytes = 0, buffer.nbytes
    while done < nbytes:
        count = os.pwrite(fd, buffer[done : done + PIECE_NBYTES_MAX], offset + done)
        if count <= 0:
            # POSIX allows it and a loop would never end; no medium recovers from it.
            raise OSError(errno.EIO, "write made no progress")
        done += count


def pread_all(fd: int, out: memoryview, offset: int) -> int:
    """Fill `out` from `offset`; returns how many bytes there were before the end of the file."""
    done, nbytes = 0, out.nbytes
    while done < nbytes:
        count = os.preadv(fd, [out[done : done + PIECE_NBYTES_MAX]], offset + done)
        if count <= 0:
            break
        done += count
    return done


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve space, so that a full disk is known before the first byte is sent.

    Raises:
        OSError: ENOSPC and its like; a file system that cannot reserve is no error.
    """
    if nbytes <= 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (
            errno.EOPNOTSUPP,
            errno.EINVAL,
            errno.ENOSYS,
            errno.ENODEV,
            errno.ESPIPE,
        ):
            raise


def start_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to write a range that is in the page cache, without waiting for it: the
    fsync at the end then finds little left. Linux only; elsewhere nothing happens.

    Raises:
        OSError: The write failed already.
    """
    call = _sync_file_range()
    if call is not None and call(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        import ctypes

        code = ctypes.get_errno()
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


_SYNC_FILE_RANGE_WRITE = 2


@functools.cache
def _sync_file_range():  # type: ignore[no-untyped-def]
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):  # musl has none on some machines
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


def sync_fd(fd: int) -> None:
    """What was written to `fd` is on the medium when this returns."""
    if sys.platform == "darwin":
        # fsync there leaves the bytes in the drive's cache.
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError:
            pass
    os.fsync(fd)


def sync_directory(path: str) -> None:
    """Names created in and removed from `path` are on the medium when this returns."""
    if sys.platform == "win32":
        return  # a directory cannot be opened there; NTFS journals names itself
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems (FUSE, old CIFS) have no fsync for directories and say EINVAL.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def rename_noreplace(source: str, target: str) -> None:
    """Rename, unless `target` exists.

    Raises:
        FileExistsError: It does.
        OSError: ENOSYS, EINVAL or ENOTSUP where the system or file system has no such call.
    """
    if sys.platform == "win32":
        os.rename(source, target)
        return
    _rename_with(source, target, _NOREPLACE)


def exchange_names(one: str, other: str) -> None:
    """Swap what two names of one file system stand for, at once: neither is ever missing.

    Raises:
        OSError: ENOSYS, EINVAL or ENOTSUP where the system or file system has no such call.
    """
    _rename_with(one, other, _EXCHANGE)


_NOREPLACE, _EXCHANGE = 1, 2


def _rename_with(source: str, target: str, flags: int) -> None:
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    call(source, target, flags)


@functools.cache
def _renameat2():  # type: ignore[no-untyped-def]
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    ]
    function.restype = ctypes.c_int
    at_cwd = -100

    def call(source: str, target: str, flags: int) -> None:
        done = function(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flags)
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), target)

    return call


def file_system_of(path: str) -> str:
    """Name of the file system that holds `path` or its nearest parent: `ext4`, `nfs4`; or ''."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            mounts = [_parse_mount(line) for line in lines]
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, name = -1, ""
    for mount_point, file_system in mounts:
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        # >=: of two mounts on one point the later hides the earlier.
        if inside and len(mount_point) >= best:
            best, name = len(mount_point), file_system
    return name


def _parse_mount(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" - ")
    fields, kind = left.split(" "), right.split(" ", 1)[0]
    if len(fields) < 5:
        return "\0", ""
    point = fields[4]
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point, kind


def network_facts(file_system: str) -> tuple[bool, float | None]:
    """Whether it is a network file system, and how stale its listings may be in seconds."""
    base = "fuse" if file_system.startswith("fuse.") else file_system
    if base in _NETWORK:
        return True, _NETWORK[base]
    return False, 0.0
