"""The archives in ``dist/``: what is in them, and each of them installed alone. ``make dist`` builds them."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers import ROOT, write_script
from installed import Installed, new_environment
from page_session import is_as_shown
from pages import blocks
from test_readme import SCRIPT, SHOWN

pytestmark = pytest.mark.dist

PATTERNS = {"sdist": "*.tar.gz", "wheel": "*.whl"}
CONFORMANCE = "pytest --pyargs ignite_dist.testing.conformance --backend gloo --ranks 2 -k all_reduce"
PYTEST = ("numpy", "psutil", "pytest")  # the extra `testing`
# What else the sdist needs to build the wheel
OF_SDIST = {
    *("LICENSE", "README.md", "pyproject.toml", "setup.cfg"),
    ".ci/build_backend/setuptools_in_copy.py",
}


def archive(kind: str) -> Path:
    (path,) = (ROOT / "dist").glob(PATTERNS[kind])
    return path


# --- what is in them -----------------------------------------------------------------------------------


def _public() -> set[str]:
    """The package and its plugin, as git has them: what users get."""
    command = ["git", "ls-files", "ignite_dist", "pytest_ignite_dist.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return set(listed.stdout.splitlines())


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    with zipfile.ZipFile(archive("wheel")) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {name: (ROOT / name).read_bytes() for name in _public()}
    tests = {name for name in found if Path(name).name.startswith("test_")}
    assert {str(Path(name).parent) for name in tests} == {"ignite_dist/testing/conformance"}


def test_the_sdist_has_what_builds_the_wheel_and_nothing_else() -> None:
    with tarfile.open(archive("sdist")) as sdist:
        names = {one.name.partition("/")[2] for one in sdist.getmembers() if one.isfile()}
    made = {name for name in names if name in ("PKG-INFO", "MANIFEST.in") or ".egg-info/" in name}
    # setuptools writes its own lines into the sdist's setup.cfg: names are compared.
    assert names - made == _public() | OF_SDIST


# --- each installed alone ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PATTERNS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    new = new_environment(tmp_path_factory.mktemp(request.param))
    ended = new.run(f"pip install {archive(request.param)}")
    assert ended.returncode == 0, ended.output + ended.errors
    return new


def test_import(installed: Installed) -> None:
    ended = installed.run("python -c 'import ignite_dist; print(ignite_dist.__file__)'")
    assert Path(ended.output).is_relative_to(installed.folder / "new"), ended.errors


def test_the_first_script(installed: Installed) -> None:
    write_script(installed.folder, SCRIPT, "train.py")
    ended = installed.run("python train.py", OMP_NUM_THREADS="1")
    assert is_as_shown(ended.output.splitlines(), SHOWN["python train.py"]), ended.output + ended.errors


@pytest.mark.parametrize(
    ("command", "shown"), [("env", r"\n  gloo +works"), ("check", r"\nAll is well")], ids=["env", "check"]
)
def test_the_program(installed: Installed, command: str, shown: str) -> None:
    ended = installed.run(f"ignite-dist {command}")
    assert ended.returncode == 0, ended.output + ended.errors
    assert re.search(shown, ended.output), ended.output


def test_the_plugin(installed: Installed) -> None:
    """The first test of the page about it."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (text,) = [block.text for block in blocks(page) if block.title == "test_mean.py"]
    write_script(installed.folder, text, "test_mean.py")
    ended = installed.run("python -m pytest -q test_mean.py", *PYTEST)
    assert ended.returncode == 0 and "1 passed" in ended.output, ended.output + ended.errors


def test_the_conformance_suite(installed: Installed) -> None:
    ended = installed.run(f"python -m {CONFORMANCE}", *PYTEST)
    assert ended.returncode == 0 and " passed" in ended.output, ended.output + ended.errors
