"""The one error of this package: a checkpoint that cannot be written, read or trusted."""

import errno
import os
import shutil
from pathlib import Path


class CheckpointError(ValueError):
    """Says which file or tensor, what was found, what was expected, and what to do."""


def from_os_error(error: OSError, path: Path, needed: int) -> CheckpointError:
    """Turns a failed write of `needed` bytes at `path` into an error that says what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"{path}: no room on the disk ({error.strerror}): {needed:,} bytes to write, "
            f"{free_bytes(path):,} bytes free. Free some space or keep fewer checkpoints "
            "(checkpoint.keep); the earlier checkpoints are untouched"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CheckpointError(
            f"{path}: not writable ({error.strerror}), {needed:,} bytes to write. Give the user "
            f"(uid {os.getuid()}) the right to write there or choose another run folder"
        )
    return CheckpointError(f"{path}: could not be written ({error.strerror or error}), {needed:,} bytes to write")


def free_bytes(path: Path) -> int:
    """Bytes free for this user on the disk that holds `path` or its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
