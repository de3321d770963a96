"""Small files that are replaced as a whole: after a crash each has its new content or its old one.

Errors of the operating system are raised as they are: the caller knows what the file is for.
"""

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

from storage.vfs import RealFS

_LINKS_MAX: Final = 40
_NEW_FILE_MODE: Final = 0o644
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without hard links say, such as those of network shares."""


def create_private_file(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read; durable when it returns.

    Raises:
        FileExistsError: the name is taken; what is there stays.
        OSError: it cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        try:
            # Unlike a rename, a link never takes the place of a file that came meanwhile.
            path.hardlink_to(file.name)
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
            _write_new(path, data)
    RealFS().sync_directory(path.parent)


def _write_new(path: Path, data: bytes) -> None:
    """The same without a link: a crash may leave a part of it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of what a file has, in one step, for readers at any time; durable
    when it returns. The file keeps its mode and owner; a symbolic link stays one. A file that is
    not there is made.

    Raises:
        OSError: it cannot be written, or would have another owner; what is there stays.
    """
    target = _behind_links(path)
    before = target.stat() if target.exists() else None
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            if before is not None:
                # Else the daemon that reads the file might not be allowed to any more.
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fchmod(file.fileno(), before.st_mode & 0o777 if before else _NEW_FILE_MODE)
            os.fsync(file.fileno())
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    RealFS().sync_directory(target.parent)


def _behind_links(path: Path) -> Path:
    """The file that a name stands for. Only its own links are followed: the directory stays as it
    was given, as `/proc/PID/root` leads elsewhere than its link says.
    """
    for _ in range(_LINKS_MAX):
        if not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
