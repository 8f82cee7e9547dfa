"""The main modules that people write: without a guard, with everything under it, and of a package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers import plain_environ, run_new_python, write_script


@pytest.mark.long
def test_a_script_without_a_guard_is_told_in_a_line(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ignite_dist as idist

        idist.spawn("gloo", print, nproc_per_node=2)
        """,
    )
    ended = run_new_python(script)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("The script starts workers when it is imported"), ended.stdout
    assert "multiprocessing" not in ended.stdout and len(lines) < 20, ended.stdout


@pytest.mark.long
def test_a_function_under_the_guard_is_named(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ignite_dist as idist

        if __name__ == "__main__":
            def train(local_rank):
                pass

            idist.spawn("gloo", train, nproc_per_node=2)
        """,
    )
    ended = run_new_python(script)
    assert ended.returncode == 1
    assert "LaunchError: A worker did not find what was sent: " in ended.stdout
    assert "'train'" in ended.stdout and "Define functions and classes above that part." in ended.stdout


@pytest.mark.long
def test_functions_of_the_main_module_of_a_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    write_script(
        package,
        """
        import ignite_dist as idist
        from package import __name__ as NAME

        def train(local_rank):
            return idist.all_gather(f"{NAME} {local_rank}")

        if __name__ == "__main__":
            print(idist.spawn("gloo", train, nproc_per_node=2)[0])
        """,
        "__main__.py",
    )
    environ = plain_environ()
    environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
    assert run_new_python("-m", "package", env=environ).stdout == "['package 0', 'package 1']\n"


CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell('''
def train(local_rank):
    raise ValueError(local_rank)  # the line that failed
''')
shell.run_cell('''
import ignite_dist as idist
try:
    idist.spawn("gloo", train, nproc_per_node=2)
except idist.WorkerRaisedError as error:
    print(error)
''')
"""


def test_a_traceback_shows_the_line_of_a_notebooks_cell(tmp_path: Path) -> None:
    ended = run_new_python(write_script(tmp_path, CELLS), env=plain_environ(IPYTHONDIR=str(tmp_path)))
    assert "raise ValueError(local_rank)  # the line that failed" in ended.stdout
