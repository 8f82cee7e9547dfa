"""An environment that has only what ``pip install .`` needs, and that package; nothing is downloaded.

Its packages are links to those of the interpreter that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from commands import Ended, at_a_shell
from helpers import ROOT

NEEDED = ("torch", "cloudpickle")  # as README says, with what these two need


class Installed(NamedTuple):
    """An environment. A folder in it may have a copy of this checkout."""

    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def run(
        self, command: str, *packages: str, folder: Path | None = None, under: str = "new/bin", **environ: str
    ) -> Ended:
        """Run the command with links to ``packages`` and to their requirements, and to no other package."""
        links = _links(self.folder, *packages)
        offline = {
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # for pip this is "no isolation", which would download setuptools
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        return at_a_shell(
            command,
            folder or self.folder,
            programs=self.folder / under,
            **{**offline, "PYTHONPATH": str(links), **environ},
        )


def new_environment(folder: Path) -> Installed:
    """A new environment with Python and pip, and torchrun, which pip would install with torch.

    It has no copy of the checkout: see :func:`copy_checkout`.
    """
    subprocess.run([sys.executable, "-m", "venv", folder / "new"], check=True, timeout=200)
    python = folder / "new" / "bin" / "python"
    (torchrun,) = metadata.entry_points(group="console_scripts", name="torchrun")
    script = python.with_name("torchrun")
    script.write_text(f"#!{python}\nimport sys\nfrom {torchrun.module} import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return Installed(folder)


def copy_checkout(folder: Path) -> None:
    """Copy all that git has, or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not one that has been deleted meanwhile
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def _links(folder: Path, *names: str) -> Path:
    """A folder with links to these packages, to their requirements and to what builds a package."""
    links = folder / "-".join(["links", *names])
    if not links.exists():
        links.mkdir()
        for distribution in _with_requirements("setuptools", "wheel", *NEEDED, *names):
            tops = {file.parts[0] for file in distribution.files or ()} - {os.pardir, "__pycache__"}
            for top in tops - {link.name for link in links.iterdir()}:
                (links / top).symlink_to(str(distribution.locate_file(top)))
    return links


def _with_requirements(*names: str) -> list[metadata.Distribution]:
    """The packages and all that they require, also through extras: torch needs ``cuda-toolkit[...]``."""
    found: dict[str, metadata.Distribution] = {}
    missing = [(name.lower(), "") for name in names]
    done: set[tuple[str, str]] = set()
    while missing:
        name, extra = missing.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        found[name] = metadata.distribution(name)
        for other in map(Requirement, found[name].requires or ()):
            if other.marker is None or other.marker.evaluate({"extra": extra}):
                missing += [(other.name.lower(), one) for one in ("", *other.extras)]
    return list(found.values())
