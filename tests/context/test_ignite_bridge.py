"""pytorch-ignite's own modules beside this package: they see the contexts that it makes, and their ends.

Where torch_xla is installed, ignite 0.5.5 asks it for a context, by functions that release 2.9 no longer has.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

import helpers
import ignite_dist as idist

# They run in .venv; beside torch_xla ignite itself raises AttributeError in every process without a context.
pytestmark = pytest.mark.skipif(
    find_spec("torch_xla") is not None, reason="ignite 0.5.5 needs an older torch_xla"
)

NUM_CONTEXTS = 2


def _accuracy(guesses: list[int]) -> float:
    """Of ignite's metric, which is a collective of ignite's own where there is a context."""
    from ignite.metrics import Accuracy

    accuracy = Accuracy()
    accuracy.update((torch.tensor(guesses), torch.tensor([0, 1])))
    return accuracy.compute()


def _see_the_context(backend: str) -> None:
    rank = idist.get_rank()
    if rank == 0:  # ignite's own first look is a collective, for which the other rank does not come
        from ignite.utils import setup_logger

        setup_logger("of rank 0 alone")
    idist.barrier()
    import ignite.distributed as theirs

    seen = theirs.get_rank(), theirs.get_world_size(), theirs.get_local_rank(), theirs.get_nproc_per_node()
    assert seen == (rank, 2, rank, 2) and theirs.get_nnodes() == 1 and theirs.get_node_rank() == 0
    assert theirs.backend() == backend and theirs.model_name() == idist.model_name()
    assert _accuracy([rank, 1]) == 0.75


def _see_no_context() -> None:
    import ignite.distributed as theirs

    assert theirs.get_world_size() == 1 and theirs.model_name() == "serial" and theirs.backend() is None
    assert _accuracy([0, 1]) == 1.0


def _contexts(is_loaded_before: bool, fails: bool) -> None:
    if is_loaded_before:
        import ignite.engine  # noqa: F401
    assert ("ignite.distributed" in sys.modules) is is_loaded_before
    finders = list(sys.meta_path)
    for _ in range(NUM_CONTEXTS):
        try:
            with idist.Parallel("gloo"):
                _see_the_context("gloo")
                if fails:
                    raise LookupError
        except LookupError:
            assert fails
        _see_no_context()
    assert sys.meta_path == finders


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_loaded_before", [True, False])
def test_ignite_follows_the_contexts_of_parallel(is_loaded_before: bool, fails: bool) -> None:
    helpers.run_ranks(_contexts, is_loaded_before, fails)


def _never_loaded() -> None:
    finders = list(sys.meta_path)
    idist.initialize("gloo")
    idist.finalize()
    assert sys.meta_path == finders and "ignite" not in sys.modules


def test_a_context_without_ignite_leaves_nothing_behind() -> None:
    helpers.run_ranks(_never_loaded)


def _context_of_its_own() -> None:
    """After a context of ours ignite goes on to find those that others make."""
    import ignite.distributed as theirs

    with idist.Parallel("gloo"):
        pass
    torch.distributed.init_process_group("gloo")
    assert theirs.get_world_size() == idist.get_world_size() == 2
    torch.distributed.destroy_process_group()


def test_ignite_finds_contexts_of_others_as_before() -> None:
    helpers.run_ranks(_context_of_its_own)


def _worker(local_rank: int, backend: str) -> None:
    _see_the_context(backend)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_ignite_follows_the_contexts_of_workers(backend: str) -> None:
    idist.spawn(backend, _worker, (backend,), nproc_per_node=2)
