"""Sharded states in a folder, written and read by ``torch.distributed.checkpoint``.

Imported only for sharded states.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from ignite_dist.internals import limits

_METADATA = ".metadata"


def writer(folder: Path, shards: Mapping[str, Any], group: Any = None) -> Callable[[], None]:
    """A function that returns when all ranks have written their shards. Every rank calls it.

    Args:
        folder: the folder.
        shards: the sharded tensors by name.
        group: if given, the shards are copied to the CPU now, and a thread begins to write. A group of all
            ranks for collectives of CPU tensors, which nothing else uses.

    Raises:
        OSError: a rank cannot write. Raised on every rank by the returned function.
    """
    files = _Writer(folder)
    begun = None if group is None else dcp.async_save(dict(shards), storage_writer=files, process_group=group)

    def write() -> None:
        handled = sys.exc_info()[1]
        try:
            if isinstance(begun, Future):
                begun.result()
            else:
                dcp.save(dict(shards), storage_writer=files)
        except CheckpointException as error:  # not an Exception
            cause = next(iter(error.failures.values()))[0]
            num_bytes = partial(sum, (one.numel() * one.element_size() for one in shards.values()))
            what = f"The folder {folder} of sharded tensors"
            raise limits.error_of_write(what, folder.parent, cause, num_bytes, handled) from cause

    return write


def read_into(folder: Path, tensors: Mapping[str, Any], alone: bool = False) -> None:
    """Fill ``tensors``, sharded or whole, by name. Every rank calls this, or one with ``alone``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not needed alone
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=alone)
    except CheckpointException as error:  # not an Exception
        raise RuntimeError(f"The sharded tensors cannot be read from {folder}: {error}") from error


def check(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise if ``folder`` does not hold ``tensors``. Reads no tensors.

    Raises:
        ValueError: the folder or one of its files is missing or too short, or a tensor is missing.
    """
    try:
        metadata = _Reader(folder).read_metadata()
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"The checkpoint is torn: {folder / _METADATA} is missing or damaged ({error})."
        ) from error
    for info in metadata.storage_data.values():
        file = folder / info.relative_path
        if not file.exists() or file.stat().st_size < info.offset + info.length:
            raise ValueError(f"The checkpoint is torn: {file} is missing or too short.")
    for name, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(name)
        if getattr(saved, "size", None) != tensor.shape:
            raise ValueError(
                f"The checkpoint is torn: {folder} has no {name} of shape {tuple(tensor.shape)}."
            )


class _Writer(FileSystemWriter):
    """A writer that tells the other ranks why it cannot write: torch sends them only the last error."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """See ``FileSystemWriter``."""
        handled = sys.exc_info()[1]
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise limits.cause_of_write(error, handled) from None


class _Reader(FileSystemReader):
    """A reader whose metadata cannot run code: torch's own unpickles it without limits."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See ``FileSystemReader``."""
        with open(Path(self.path) / _METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    """Admits the classes of torch's metadata, which only hold data.

    ``BytesStorageMetadata`` is refused: torch would unpickle such an entry without limits.
    """

    def find_class(self, module: str, name: str) -> Any:
        """See ``pickle.Unpickler``."""
        if "." not in name:
            if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
                return getattr(torch, name)
            if module == "torch.serialization":  # the layout of a tensor, by name
                return _strided
            if module.partition(".")[0] == "pathlib":  # the folder when it was written
                return _no_path
            if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3: a member of an enum
                return _member
            if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
                found: Any = super().find_class(module, name)
                is_data = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
                if is_data and found is not BytesStorageMetadata:
                    return found
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not data of a checkpoint")


def _strided(_: str) -> torch.layout:
    return torch.strided


def _no_path(*_: str) -> None:
    return None


def _member(kind: Any, name: str) -> enum.Enum:
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it contains {name} of {kind!r}, which is not data of a checkpoint")
    return kind.__members__[name]
