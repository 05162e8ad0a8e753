"""Whether another user could put files into a folder: what is loaded from there runs as this one."""

import os
import stat
from pathlib import Path

_MOST_LINKS = 40


def distrust(path: Path) -> str | None:
    """Say why a folder is not to be trusted; None where only this user and root can change what is in it.

    Each folder on the way counts, and each link: who can rename one of them decides what lies behind it. In a folder
    with the sticky bit, as /tmp, what belongs to this user stays where it is.

    Parameters
    ----------
    path : Path
        Absolute. What of it does not exist is not looked at.

    Returns
    -------
    str or None
    """
    trusted = {0, os.geteuid()}
    here, ahead = Path("/"), list(path.parts[1:])
    links = 0
    try:
        reason = _of_folder(here, here.lstat(), trusted, is_last=not ahead)
        while ahead and reason is None:
            part = ahead.pop(0)
            if part == "..":
                here = here.parent
                continue
            place = here / part
            found = place.lstat()
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    return f"{path} leads through too many links"
                if found.st_uid not in trusted:
                    return f"the link {place} belongs to user {found.st_uid}"
                target = place.readlink()
                here = Path("/") if target.is_absolute() else here
                ahead = [*(target.parts[1:] if target.is_absolute() else target.parts), *ahead]
                continue
            here = place
            reason = _of_folder(here, found, trusted, is_last=not ahead)
    except OSError:
        return None  # not there, or not to be looked into: nothing is read from it
    return reason


def _of_folder(place: Path, found: os.stat_result, trusted: set[int], *, is_last: bool) -> str | None:
    if found.st_uid not in trusted:
        return f"{place} belongs to user {found.st_uid}"
    others_write = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid))
    if others_write and (is_last or not found.st_mode & stat.S_ISVTX):
        return f"{place} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _is_private(gid: int) -> bool:
    """Whether a group is this user's alone, as many distributions make one for each user, of the same name."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, that only this user can write, whatever the umask is.

    Parameters
    ----------
    path : Path

    Raises
    ------
    OSError
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o755, exist_ok=True)
