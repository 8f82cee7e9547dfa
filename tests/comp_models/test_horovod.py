"""Horovod's contexts and groups: what the conformance suite, which it passes as well, does not ask.

Contexts that a process makes itself are made in processes of their own: Horovod leaves threads behind.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.horovod import transport as horovod_transport
from ignite_dist.comp_models.horovod.one_machine import HorovodOnOneMachine

pytestmark = pytest.mark.horovod

# Both are this machine, so no ssh is needed; to Horovod they are two nodes.
HOSTS = "localhost:1,127.0.0.1:1"
HOROVODRUN = (sys.executable, "-m", "horovod.runner.launch", "--gloo")


def spawn(function: Any, *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> Any:
    return idist.spawn("horovod", function, args, nproc_per_node=nproc_per_node, **kwargs)


def run_script(folder: Path, text: str, launcher: tuple[str, ...] = (), **environ: str) -> str:
    """What the script printed; it must succeed."""
    ended = subprocess.run(
        [*launcher, helpers.python_that_forks(), str(helpers.write_script(folder, text))],
        env=helpers.plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def lines_of(output: str) -> list[str]:
    """The lines that ``horovodrun`` passes on from its workers' standard output, in rank order."""
    return sorted(re.findall(r"^\[\d+\]<stdout>:(.*)$", output, re.MULTILINE))


def who(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    assert idist.all_reduce(1) == idist.get_world_size()
    return {
        "ranks": (local_rank, idist.get_rank(), idist.get_local_rank(), int(os.environ["RANK"])),
        "sizes": (idist.get_world_size(), idist.get_nproc_per_node(), idist.get_nnodes()),
        "model": (idist.model_name(), idist.backend(), idist.device()),
        "called": (args, kwargs),
    }


# --- contexts ----------------------------------------------------------------------------------------


def test_installed_is_not_in_use(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import sys
        import ignite_dist as idist
        assert idist.has_hvd_support and "horovod" in idist.available_backends()
        assert idist.model_name() == "serial" and idist.get_world_size() == 1
        assert not any(name.split(".")[0] == "horovod" for name in sys.modules)

        import horovod.torch
        assert idist.model_name() == "serial" and idist.backend() is None
        """,
    )


def test_initialize_with_nothing_set_is_a_world_of_one_and_can_be_repeated(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import os
        import pytest, torch
        import ignite_dist as idist
        for _ in range(3):
            idist.initialize("horovod")
            assert (idist.model_name(), idist.backend()) == ("horovod-dist", "horovod")
            assert (idist.get_rank(), idist.get_world_size(), idist.get_local_rank()) == (0, 1, 0)
            assert (idist.get_nnodes(), idist.get_node_rank(), idist.get_nproc_per_node()) == (1, 0, 1)
            assert idist.all_reduce(torch.ones(2), group=[0]).tolist() == [1, 1]
            assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", "0")
            with pytest.raises(RuntimeError, match="already"):
                idist.initialize("horovod")
            idist.finalize()
            assert idist.model_name() == "serial"
            assert not {"HOROVOD_DYNAMIC_PROCESS_SETS", "RANK", "WORLD_SIZE"} & set(os.environ)
        """,
    )


OWN_INIT = """
    import horovod.torch as hvd, pytest, torch
    import ignite_dist as idist

    hvd.init({process_sets})
    assert idist.model_name() == "horovod-dist"
    assert (idist.get_rank(), idist.get_world_size()) == (hvd.rank(), 2)
    assert idist.all_gather(idist.get_rank()) == [0, 1]
"""


def test_a_context_of_the_users_own_is_found_and_left(tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        OWN_INIT.format(process_sets="")
        + """
    hvd.shutdown()
    assert idist.model_name() == "serial" and idist.get_world_size() == 1
    print("done")
""",
        launcher=(*HOROVODRUN, "-np", "2"),
    )
    assert lines_of(output) == ["done", "done"]


def _one_context_after_another(_: int) -> list[int]:
    hvd = sys.modules["horovod.torch"]
    idist.finalize()
    hvd.init(process_sets="dynamic")
    sums = []
    for _number in range(10):
        assert idist.all_reduce(1, group=[1]) == 1
        sums.append(idist.all_reduce(1))
        hvd.shutdown()  # and a new context at once: its groups are others
        hvd.init()
    idist.finalize()
    assert not hvd.is_initialized() and idist.model_name() == "serial"
    return sums


def test_contexts_that_follow_each_other_at_once_are_told_apart() -> None:
    """In our own workers: ranks of horovodrun may find each other's old addresses."""
    assert spawn(_one_context_after_another) == [[2] * 10] * 2


def test_without_dynamic_process_sets_a_group_names_the_variable(tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        OWN_INIT.format(process_sets="process_sets=[hvd.ProcessSet([1])]")
        + """
    with pytest.raises(RuntimeError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        idist.all_reduce(torch.ones(1), group=[0])
    assert idist.all_reduce(torch.ones(1), group=[0, 1]).item() == 2  # the set of all ranks is always there
    assert idist.all_reduce(1, group=[1]) == 1  # and so is the user's own
    mine = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="never added"):
        idist.all_reduce(1, group=mine)
    idist.barrier()  # who ends first ends Horovod for all
    print("done")
""",
        launcher=(*HOROVODRUN, "-np", "2"),
    )
    assert lines_of(output) == ["done", "done"]


def test_horovodrun(tmp_path: Path) -> None:
    """Three ranks on two hosts, as far as Horovod can tell: two on the first, one on the second."""
    output = run_script(
        tmp_path,
        """
        import ignite_dist as idist, torch

        def work(local_rank):
            assert idist.all_reduce(torch.ones(1)).item() == 3
            print(idist.get_rank(), local_rank, idist.get_world_size(), flush=True)

        with idist.Parallel(backend="horovod") as parallel:
            parallel.run(work)
        assert idist.model_name() == "serial"
        """,
        launcher=(*HOROVODRUN, "-np", "3", "-H", "localhost:2,127.0.0.1:1"),
    )
    assert lines_of(output) == ["0 0 3", "1 1 3", "2 0 3"]


def test_a_script_that_makes_no_context_under_horovodrun_is_told(tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        "import ignite_dist as idist; idist.barrier()",
        launcher=(*HOROVODRUN, "-np", "2"),
    )
    assert output.count("This is one of 2 processes (HOROVOD_RANK and HOROVOD_SIZE are set)") == 2


@pytest.mark.parametrize("comm", ["None", "[]", "[0, 1]", "(1, 0)"])
def test_comm_of_all_ranks(comm: str, tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        f"""
        import ignite_dist as idist
        idist.initialize("horovod", comm={comm})
        print(idist.all_gather(idist.get_rank()))
        idist.finalize()
        """,
        launcher=(*HOROVODRUN, "-np", "2"),
    )
    assert lines_of(output) == ["[0, 1]", "[0, 1]"]


# --- groups and operations ---------------------------------------------------------------------------


def _late_group(_: int, told: Path) -> str:
    """Rank 0 uses a group that rank 1 has not made; it is told what it waits for."""
    if idist.get_rank() == 0:
        horovod_transport.PATIENCE_SECONDS = 0.3
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: told.touch() or True)
        horovod_transport._logger.addHandler(handler)
    while idist.get_rank() == 1 and not told.exists():
        time.sleep(0.01)
    assert idist.all_reduce(1, group=[0]) == 1
    return "met"


def test_a_group_that_some_rank_does_not_make_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert spawn(_late_group, tmp_path / "told") == ["met", "met"]
    output = capfd.readouterr().err
    assert output.count("Rank 0 waits for the other ranks to make the group [0].") == 1


def _late_call(_: int, told: Path) -> int:
    """Without a watchdog too, a rank says for whom it waits."""
    if idist.get_rank() == 0:
        HorovodOnOneMachine.patience_seconds = 0.3
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: told.touch() or True)
        logging.getLogger("ignite_dist").addHandler(handler)
    idist.barrier()
    while idist.get_rank() == 1 and not told.exists():
        time.sleep(0.01)
    return idist.all_reduce(1)


def test_a_rank_that_waits_in_shared_memory_says_for_whom(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert spawn(_late_call, tmp_path / "told") == [2, 2]
    output = capfd.readouterr().err
    assert re.search(r"Rank 0 has waited \d+ s for rank 1 \(pid \d+\) in all_reduce at comp_models/", output)


def _interrupted_behind_another(_: int, told: Path) -> int:
    """Rank 0 waits for its asynchronous call, and is interrupted."""
    idist.barrier()
    if idist.get_rank() == 0:
        work = idist.all_reduce(torch.ones(2), async_op=True)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            idist.barrier()
        told.touch()
    else:
        while not told.exists():
            time.sleep(0.01)
        work = idist.all_reduce(torch.ones(2), async_op=True)
    assert work.wait().tolist() == [2.0, 2.0]
    if idist.get_rank() == 1:
        with pytest.raises(idist.CollectiveMismatchError):
            idist.barrier()
    return idist.all_reduce(1)


def test_an_interrupt_behind_an_asynchronous_call_arrives_and_counts(tmp_path: Path) -> None:
    assert spawn(_interrupted_behind_another, tmp_path / "told") == [2, 2]


def _different_shapes(_: int) -> None:
    horovod_transport.PATIENCE_SECONDS = 0.3
    idist.all_reduce(torch.ones(2 + idist.get_rank()))


def test_ranks_that_wait_for_each_other_say_in_which_call(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IGNITE_DIST_SHARED_MEMORY", "0")  # over which it is a mismatch
    workers = spawn(_different_shapes, join=False)
    output, deadline = "", time.monotonic() + 120
    try:
        for rank, shape in enumerate(("(2,)", "(3,)")):
            call = re.escape(f"all_reduce.SUM.torch.float32.{shape}")
            while re.search(rf"Rank {rank} has waited .*{call}", output) is None:
                assert time.monotonic() < deadline, output
                assert workers.join(0.1) is None
                output += capfd.readouterr().err
    finally:
        workers.terminate()


def _removed_set(_: int) -> None:
    import horovod.torch as hvd

    handle = idist.new_group([0])
    assert isinstance(handle, hvd.ProcessSet)
    hvd.remove_process_set(handle)
    with pytest.raises(ValueError, match="removed"):
        idist.all_reduce(1, group=handle)
    assert idist.all_reduce(1, group=[0]) == 1  # a list makes a new one
    mine = hvd.add_process_set([1])
    assert idist.all_reduce(torch.ones(1), group=[1]).item() == 1  # Horovod would refuse to add it again
    assert idist.all_reduce(torch.ones(1), group=mine).item() == 1
    assert idist.new_group([0, 1]).process_set_id == hvd.global_process_set.process_set_id
    with pytest.raises(TypeError, match="backend"):
        idist.new_group([0], backend="gloo")


def test_process_sets_that_were_removed_or_are_the_users_own() -> None:
    spawn(_removed_set)


def _user_calls_between(_: int) -> None:
    """A rank outside a group falls out of step with Horovod's own counter only, not with ours."""
    import horovod.torch as hvd

    idist.new_group([0])
    for _ in range(5):
        if idist.get_rank() == 0:
            idist.all_reduce(torch.ones(3), group=[0])
            idist.all_gather(torch.ones(3), group=[0])
            idist.broadcast("text", src=0, group=[0])
        assert idist.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="mine").tolist() == [2, 2]
        idist.barrier()


def test_ranks_outside_a_group_never_stall_the_world() -> None:
    spawn(_user_calls_between)


def _refusals(_: int) -> None:
    for op, dtype in (("AND", torch.float32), ("SUM", torch.bool), ("AVERAGE", torch.int64)):
        tensor = torch.ones(2, dtype=dtype)
        with pytest.raises(TypeError, match=str(dtype)):
            idist.all_reduce(tensor, op)
    with pytest.raises(ValueError, match="ADASUM needs Horovod built with MPI"):
        idist.all_reduce(torch.ones(2), "ADASUM")
    with pytest.raises(ValueError, match="world_size"):
        idist.all_reduce(torch.ones(2), group=[0, 2])
    with pytest.raises(ValueError, match="ProcessSet"):
        idist.barrier(group=object())
    with pytest.raises(ValueError, match="mesh"):
        idist.barrier(group="world")
    assert idist.all_reduce(1) == 2  # nothing of the above was sent


def test_what_cannot_be_reduced_is_refused_before_anything_is_sent() -> None:
    spawn(_refusals)


def test_halves_are_summed_up_exactly_and_rounded_once() -> None:
    def summed(local_rank: int) -> float:
        tensor = torch.tensor([1.0 if local_rank == 0 else 2.0**-11], dtype=torch.float16).repeat(1000)
        return idist.all_reduce(tensor)[0].item()

    assert spawn(summed, nproc_per_node=3) == [1 + 2.0**-10] * 3


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"nnodes": 2}, "needs hosts"),
        ({"nnodes": 0}, "nnodes must be a positive int"),
        ({"nproc_per_node": 0}, "nproc_per_node must be a positive int"),
        ({"hosts": "localhost"}, "hosts is a string such as"),
        ({"hosts": ["localhost:2"]}, "hosts is a string such as"),
        ({"hosts": "localhost:1", "nproc_per_node": 2}, "1 slots for 2 processes"),
        ({"hosts": HOSTS, "nproc_per_node": 1, "nnodes": 3}, "2 slots for 3 processes"),
        ({"hosts": HOSTS, "nproc_per_node": 1, "join": False}, "join=False"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(kwargs: dict[str, Any], words: str) -> None:
    arguments = {"nproc_per_node": 2, **kwargs}
    for start in (
        lambda: idist.spawn("horovod", who, **arguments),
        lambda: idist.Parallel(backend="horovod", **arguments),
    ):
        with pytest.raises(ValueError, match=words):
            start()


def test_keywords_that_horovod_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'host'. Did you mean 'hosts'"):
        spawn(who, host="localhost:2")
    with pytest.raises(TypeError, match="'master_addr'"):
        idist.Parallel(backend="horovod", nproc_per_node=2, master_addr="127.0.0.1")
    with pytest.raises(TypeError, match=r"initialize\(\) got an unexpected keyword argument 'timeout'"):
        idist.initialize("horovod", timeout=1)


def test_a_launcher_that_horovod_does_not_know_is_refused(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import pytest
        import ignite_dist as idist
        with pytest.raises(idist.EnvironmentVariablesError, match="rank 1 of 2.*horovodrun -np 2"):
            idist.initialize("horovod")
        assert idist.model_name() == "serial"
        """,
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )


def test_gloo_finds_the_ranks_of_horovodrun(tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        """
        import ignite_dist as idist
        with idist.Parallel(backend="gloo") as parallel:
            ranks = parallel.run(lambda local_rank: idist.all_gather((idist.get_rank(), local_rank)))
        print(idist.environment().launcher, ranks)
        """,
        launcher=(*HOROVODRUN, "-np", "2"),
    )
    assert lines_of(output) == ["Horovod [(0, 0), (1, 1)]"] * 2


def test_on_several_nodes_horovodrun_does_not_say_where_rank_0_is(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import pytest
        import ignite_dist as idist
        with pytest.raises(idist.EnvironmentVariablesError, match="Horovod.*Set MASTER_ADDR"):
            idist.initialize("gloo")
        """,
        HOROVOD_RANK="0",
        HOROVOD_SIZE="2",
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
    )


def test_a_part_of_the_ranks_as_comm_is_refused(tmp_path: Path) -> None:
    """A Horovod without MPI would take all ranks, without a word."""
    run_script(
        tmp_path,
        """
        import os, pytest
        import ignite_dist as idist
        os.environ["HOROVOD_SIZE"] = "3"
        with pytest.raises(ValueError, match=r"comm=\\[0, 1\\] leaves out .* MPI"):
            idist.initialize("horovod", comm=[0, 1])
        """,
    )


NOT_THERE = """
    import pytest
    {first}
    import ignite_dist as idist

    assert not idist.has_hvd_support and "horovod" not in idist.available_backends()
    for start in (
        lambda: idist.initialize("horovod"),
        lambda: idist.spawn("horovod", print, nproc_per_node=2),
        lambda: idist.Parallel(backend="horovod"),
    ):
        with pytest.raises(ValueError, match="{words}.*make horovod"):
            start()
    {last}
"""


def test_horovod_that_is_not_installed(tmp_path: Path) -> None:
    script = NOT_THERE.format(
        first="import sys; sys.modules['horovod'] = None", last="", words="is not installed"
    )
    run_script(tmp_path, script)


def test_horovod_that_was_built_without_torch(tmp_path: Path) -> None:
    """The package as it is installed, without the one file that its build for torch makes."""
    import horovod

    folder = tmp_path / "site"
    shutil.copytree(
        Path(horovod.__file__).parent, folder / "horovod", ignore=shutil.ignore_patterns("mpi_lib_v2*")
    )
    script = NOT_THERE.format(
        first=f"import sys; sys.path.insert(0, {str(folder)!r})",
        last="import horovod.torch; assert idist.model_name() == 'serial'",
        words="was built without its torch extension",
    )
    run_script(tmp_path, script)
