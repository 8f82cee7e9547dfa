"""setuptools, run on a copy of the sources.

On the sources themselves, ``pip install .`` would leave ``build`` and ``*.egg-info`` in the checkout.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta

# An editable install is a link to the sources, so a copy would not do.
build_editable = build_meta.build_editable

_FOLDERS = ("ignite_dist", ".ci/build_backend")
_FILES = ("LICENSE", "README.md", "pyproject.toml", "pytest_ignite_dist.py", "setup.cfg")


@contextmanager
def _copy_of_sources() -> Iterator[None]:
    sources = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        for name in _FOLDERS:
            shutil.copytree(sources / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _FILES:
            shutil.copy(sources / name, copy)
        (copy / "MANIFEST.in").write_text("recursive-include .ci/build_backend *.py\n")
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(sources)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    folder = os.path.abspath(metadata_directory)
    with _copy_of_sources():
        return build_meta.prepare_metadata_for_build_wheel(folder, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    folder = os.path.abspath(wheel_directory)
    with _copy_of_sources():
        return build_meta.build_wheel(folder, config_settings)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    folder = os.path.abspath(sdist_directory)
    with _copy_of_sources():
        return build_meta.build_sdist(folder, config_settings)
