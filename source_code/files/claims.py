# SPDX-License-Identifier: Apache-2.0
"""Claims a folder for one job, so that two jobs never mix what they write into it."""

import os
import stat
from contextlib import suppress
from pathlib import Path

LOCK = "lock"  # an empty file; the lock on it is the claim, and ends with the process in every case


class ClaimError(Exception):
    """The folder is not this job's. The text is a sentence for the user."""


class NewFolder:
    """A folder that this job alone fills: claimed before the work, and released after it.

    Raises ClaimError if there is something in the folder, or if another running job has claimed it.
    """

    def __init__(self, flag, folder):
        self.folder, self.is_new = Path(folder), False
        with suppress(FileExistsError):
            self.folder.mkdir()
            self.is_new = True
        self.lock, is_held = lock_folder(flag, folder)
        if not is_held:  # without locks, a file that another job has made counts as a lock
            self.lock.close()
            sentence = f"has no locks; if no other job saves there, remove {self.folder / LOCK}"
            raise ClaimError(f"{flag} {folder}: the file system {sentence}")
        if content_of(folder):
            self.release()
            raise ClaimError(f"{flag} {folder}: something is already there; name a new folder")

    def release(self):
        """End the claim on a folder that is complete."""
        if self.lock is not None:
            unlock_folder(self.lock, self.folder)
            self.lock = None

    def is_exchanged(self):
        """Return whether another folder now has this name, and something is in it.

        A lock alone is something: it may be the claim of another job that is still at work.
        """
        there = not is_in_place(self.lock, self.folder) and self.folder.is_dir()
        return there and bool(os.listdir(self.folder))

    def check(self, flag, *names):
        """Raise ClaimError if another folder has this name by now, or somebody has made one of the
        files `names`; call it right before they are written."""
        if not is_in_place(self.lock, self.folder):
            raise ClaimError(
                f"{flag} {self.folder}: another folder has this name by now, or none has, so nothing "
                "more is written there; name a new one"
            )
        for name in names:
            if os.path.lexists(self.folder / name):
                kind = "link" if os.path.islink(self.folder / name) else "file"
                raise ClaimError(
                    f"{flag} {self.folder}: {name} is a {kind} of another program, so nothing more is "
                    "written there; name a new folder"
                )

    def renew(self, flag):
        """Claim the folder again if somebody has removed it, or all that was in it."""
        if not is_in_place(self.lock, self.folder) and not self.is_exchanged():
            lost, self.lock = self.lock, lock_folder(flag, self.folder)[0]
            lost.close()

    def give_up(self, names=()):
        """Remove the files `names` that this job has made, and its folder if nothing else is in it."""
        if self.lock is None or self.is_exchanged():
            return
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()
        self.release()
        with suppress(OSError):
            if self.is_new:
                self.folder.rmdir()


def content_of(folder):
    """Return the names in a folder, except the empty lock that a killed job has left."""
    left = Path(folder) / LOCK
    known = {LOCK} if left.is_file() and not left.stat().st_size else set()
    return set(os.listdir(folder)) - known


def lock_folder(flag, folder):
    """Make a folder if needed, and lock it until the process ends or the lock's file is closed.

    Returns the open file, and whether the claim is certain; without locks, as on Windows, it is
    certain only if the file is new. Raises ClaimError when another running job has locked the
    folder.
    """
    lock, is_new = Path(folder) / LOCK, True
    how = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(lock, how | os.O_EXCL, 0o666)
        except FileExistsError:
            handle, is_new = os.open(lock, how, 0o666), False
    except OSError as error:  # such as with umask 777
        raise ClaimError(
            f"{flag} {folder}: {lock.name} cannot be opened there ({error.strerror}); name a folder "
            "that this job can write to"
        ) from None
    file = open(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise ClaimError(f"{flag} {folder}: {lock} is not a regular file; remove it")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed it, and a third job made another.
        taken = not is_in_place(file, folder)
    except BlockingIOError:
        taken = True
    except (ImportError, OSError):
        return file, is_new
    if taken:
        file.close()
        raise ClaimError(
            f"{flag} {folder}: another job is saving there; wait for its end, or use another folder"
        )
    return file, True


def unlock_folder(lock, folder):
    """Remove and close the open file of a claim."""
    held = is_in_place(lock, folder)  # else it is another job's, in a folder that was exchanged
    if os.name == "nt":  # where an open file cannot be removed
        lock.close()
    with suppress(OSError):  # if it cannot be removed, another user has replaced it
        if held:
            (Path(folder) / LOCK).unlink()
    lock.close()


def is_in_place(lock, folder):
    """Return whether the open file of a claim is still the lock of its folder, not a removed one."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(Path(folder) / LOCK))
    return False
