"""The README's first script, as pasted, in the three ways that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import ROOT, plain_environ, run_python, write_script

README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
CONSOLE = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
SHOWN = dict(re.findall(r"^\$ (\S+) .*\n((?:epoch .*\n)+)", CONSOLE, re.MULTILINE))
HOW = {
    "python": (),
    "ignite-dist": ("-m", "ignite_dist", "run", "--nproc-per-node", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def _lines(text: str) -> list[tuple[str, float, str]]:
    found = re.findall(r"^(epoch \d): loss (\d\.\d+) on (\d ranks)$", text, re.MULTILINE)
    return [(epoch, float(loss), ranks) for epoch, loss, ranks in found]


def test_it_is_short() -> None:
    assert len(SCRIPT.splitlines()) <= 25
    assert SHOWN.keys() == HOW.keys()


@pytest.mark.parametrize("how", HOW)
def test_the_first_script_prints_what_is_shown(how: str, tmp_path: Path) -> None:
    ended = run_python(*HOW[how], write_script(tmp_path, SCRIPT), env=plain_environ(OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout
    found, shown = _lines(ended.stdout), _lines(SHOWN[how])
    assert len(found) == len(shown) == 3
    for (epoch, loss, ranks), (shown_epoch, shown_loss, shown_ranks) in zip(found, shown, strict=True):
        assert (epoch, ranks) == (shown_epoch, shown_ranks)
        assert abs(loss - shown_loss) < 0.02
