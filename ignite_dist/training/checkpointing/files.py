"""Files of checkpoints: written whole or not at all, read without running code, found and deleted.

A checkpoint is one file. It is written under a temporary name in the same folder and then renamed, so a kill
at any moment leaves the previous file of this name. Sharded states are in a folder beside the file, named by
the file's name and number. A new folder is written before the file, and the old one is deleted after it.
"""

from __future__ import annotations

import functools
import glob
import io
import os
import pickle
import re
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ignite_dist.internals import limits
from ignite_dist.values import views

_FORMAT = "ignite_dist.checkpoint"
_VERSION = 2  # the newest
TEMPORARY = ".tmp"
_ZIP = b"PK\x03\x04"
_LEAST_AGE_OF_CACHED = 2_000_000_000  # in nanoseconds


def header(number: int, names: dict[str, list[str]], shards: bool) -> dict[str, Any]:
    """The entries that say how to read a checkpoint.

    A checkpoint without several objects of a kind has version 1, which older packages read.

    Args:
        number: its number among those of its folder.
        names: the names of several optimizers, schedulers and loaders, by kind.
        shards: True if it has a folder of shards.
    """
    version = _VERSION if names else 1
    return {"format": _FORMAT, "version": version, "number": number, "names": names, "shards": shards}


def write(path: Path, content: dict[str, Any], shards: Path | None) -> None:
    """Write ``content`` whole or not at all. When this returns, a crash of the machine does not undo it.

    Args:
        path: the file.
        content: its content.
        shards: the folder of its shards, which is written already.

    Raises:
        OSError: the file cannot be written. The previous file is unchanged.
    """
    if shards is not None:
        sync_folder(shards)
        sync_folder(shards.parent)
    temporary, handled = path.with_name(path.name + TEMPORARY), sys.exc_info()[1]
    try:
        with temporary.open("wb") as file:
            views.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, Exception):
            num_bytes = functools.partial(_size, content)
            what = f"The checkpoint {path}"
            raise limits.error_of_write(what, path.parent, error, num_bytes, handled) from error
        raise
    sync_folder(path.parent)


class _Counter(io.RawIOBase):
    """A file that counts its bytes and drops them."""

    size = 0

    def write(self, data: Any) -> int:
        """See ``io.RawIOBase``."""
        num_bytes = memoryview(data).nbytes
        self.size += num_bytes
        return num_bytes


def _size(content: dict[str, Any]) -> int:
    """The size of a file with ``content``; 0 if it has none, because it cannot be pickled."""
    counter = _Counter()
    with suppress(Exception):
        views.save(content, counter)  # type: ignore[arg-type]  # it needs write() only
        return counter.size
    return 0


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a crash of the machine, where the system can do this."""
    with suppress(OSError):  # not every file system can open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint, with tensors on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, torn, not a checkpoint, or of a newer version.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder, not a checkpoint. idist.latest_checkpoint({str(path)!r}) finds its newest."
        )
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap) if is_zip else None
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it contains {found[1]}" if found else "torch.load(weights_only=True) refuses it"
        raise ValueError(f"{path} is not a checkpoint of idist.save_checkpoint: {what}.") from error
    except Exception as error:  # a RuntimeError for a part of a zip file, other errors for its entries
        raise ValueError(
            f"The checkpoint {path} is torn: a part of the file is missing or damaged."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of idist.save_checkpoint, or only the beginning of one."
        )
    content.setdefault("names", {})  # older packages did not write it
    _check_header(path, content)
    return content


_TYPES: dict[str, tuple[type, ...]] = {
    **{"version": (int,), "number": (int,), "shards": (bool,), "names": (dict,)},
    **{"values": (dict,), "random_states": (list,)},
    **{"model": (dict, OrderedDict, type(None)), "optimizer": (dict, type(None))},
    **{"scheduler": (object,), "loader": (list, type(None))},
}


def _check_header(path: Path, content: dict[str, Any]) -> None:
    version = content.get("version")
    if type(version) is int and version > _VERSION:
        raise ValueError(
            f"The checkpoint {path} has format version {version}, and this ignite_dist reads "
            f"versions up to {_VERSION}: install a newer ignite_dist."
        )
    for name, kinds in _TYPES.items():
        if name not in content or (object not in kinds and type(content[name]) not in kinds):
            found = type(content[name]).__name__ if name in content else "missing"
            raise ValueError(f"{path} is not a checkpoint of idist.save_checkpoint: its {name!r} is {found}.")


# --- the checkpoints of a folder -----------------------------------------------------------------------


def shards_folder(path: Path, number: int) -> Path:
    """The folder for the sharded states of the checkpoint ``path`` with this number.

    The file has only the number, so that both can be renamed together.
    """
    return path.with_name(f"{path.name}.shards-{number}")


def next_number(folder: Path) -> int:
    """A number larger than those of the checkpoints in ``folder``."""
    return 1 + max((number for number, *_ in _numbered(folder)), default=0)


def newest_first(folder: Path) -> list[tuple[Path, Path | None]]:
    """The checkpoints in ``folder`` without torn files, each with the folder of its shards."""
    found = sorted(_numbered(folder), reverse=True)
    return [(path, shards_folder(path, number) if is_sharded else None) for number, path, is_sharded in found]


def _numbered(folder: Path) -> Iterator[tuple[int, Path, bool]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(TEMPORARY) or path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError):  # deleted meanwhile
            status = path.stat()
            age = time.time_ns() - status.st_mtime_ns
            # Files written in the same tick of the clock may look alike.
            look = _number_of if age > _LEAST_AGE_OF_CACHED else _number_of.__wrapped__
            number, is_sharded = look(path, status.st_ino, status.st_mtime_ns, status.st_size)
            if number:
                yield number, path, is_sharded


@functools.lru_cache(maxsize=10_000)
def _number_of(path: Path, inode: int, changed: int, size: int) -> tuple[int, bool]:
    """The number of a checkpoint, and whether it has a folder of shards; 0 if it cannot be loaded."""
    try:
        content = read(path, mmap=True)  # reads no tensors
    except (OSError, ValueError):
        return 0, False
    return content["number"], content["shards"]


def delete_old(path: Path, number: int, keep: int | None) -> None:
    """Delete what the checkpoint ``path``, just written with ``number``, has replaced.

    Other folders stay, also those without a file: another job may be about to write it.

    Args:
        path: the checkpoint.
        number: its number.
        keep: number of checkpoints in its folder to keep, this one included; None keeps all.
    """
    for old, shards in newest_first(path.parent)[keep:] if keep is not None else ():
        if old != path:
            old.unlink(missing_ok=True)
            if shards is not None:
                shutil.rmtree(shards, ignore_errors=True)
    for folder in path.parent.glob(f"{glob.escape(path.name)}.shards-*"):
        text = folder.name.rpartition("-")[2]
        if text.isdecimal() and int(text) < number:
            shutil.rmtree(folder, ignore_errors=True)
