"""What only a machine with a GPU shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import helpers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU"),
]

_ASKED_ELSEWHERE = """
import sys
import threading
from torch.utils.data import DataLoader
import ignite_dist as idist

def answers():
    return str(idist.device()), idist.backend(), idist.get_local_rank()

class Asks:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return answers()

def main(local_rank):
    found = [answers()]
    thread = threading.Thread(target=lambda: found.append(answers()))
    thread.start()
    thread.join()
    loader = DataLoader(Asks(), num_workers=1, collate_fn=list, multiprocessing_context="fork")
    return found + next(iter(loader))

if __name__ == "__main__":
    print(idist.spawn(sys.argv[1], main)[0])
"""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_thread_and_a_forked_process_know_the_device(backend: str, tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, _ASKED_ELSEWHERE), backend)
    assert ended.stdout.endswith(f"{[('cuda:0', backend, 0)] * 3}\n"), ended.stdout


_FORKS = """
import torch
import ignite_dist as idist

def main(local_rank):
    return idist.all_reduce(torch.ones(2, device=idist.device())).tolist(), idist.backend()

if __name__ == "__main__":
    idist.device()
    print(idist.spawn("auto", main, nproc_per_node="auto", start_method="fork")[0])
"""


def test_a_launcher_that_forks_leaves_the_gpu_to_its_workers(tmp_path: Path) -> None:
    ended = helpers.run_python(helpers.write_script(tmp_path, _FORKS))
    assert ended.stdout.endswith("([1.0, 1.0], 'nccl')\n"), ended.stdout
