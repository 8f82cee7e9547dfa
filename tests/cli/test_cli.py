"""The command line, as a user types it: what it prints, its JSON and its exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

import ignite_dist as idist
from command_line import run_command
from helpers import (
    end_of_processes,
    end_of_ranks,
    plain_environ,
    run_python,
    run_ranks,
    write_script,
)
from ignite_dist import errors
from ignite_dist.cli import bench, interfaces, jobs, network
from ignite_dist.cli.env import collect
from ignite_dist.cli.main import main
from ignite_dist.cli.values import DTYPES
from ignite_dist.comp_models.shared_memory import opening as shared_memory
from ignite_dist.context.live import current_model
from ignite_dist.environments import Environment, devices
from ignite_dist.environments.rendezvous import network_interfaces, stores


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is said of wrong arguments, with exit status 2 and nothing on the standard output.

    The link to the documentation is a second line.
    """
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    output, said = capfd.readouterr()
    assert (status, output) == (2, "")
    (line,) = [line for line in errors.without_link(said).splitlines() if "measurement" not in line]
    return line


# --- env -----------------------------------------------------------------------------------------------


def test_env_shows_what_there_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    output, _ = capfd.readouterr()
    assert "\x1b" not in output
    for text in ("Versions", "ignite_dist", "gloo", "works (native-dist)", "127.0.0.1", "launcher", "none"):
        assert text in output
    assert re.search(r"private names +all \d+ found", output)


def test_env_as_json_says_why_backends_do_not_work(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["backends"]["gloo"] == {"works": True, "model": "native-dist", "reason": ""}
    assert {name for name, one in found["backends"].items() if one["works"]} <= set(
        idist.available_backends()
    )
    for name in ("nccl", "mpi", "horovod", "xla-tpu"):
        assert found["backends"][name]["works"] or len(found["backends"][name]["reason"]) > 20
    assert "127.0.0.1" in [address for own in found["interfaces"].values() for address in own]
    assert found["private_names"]["missing"] == {}
    assert found["environment"]["launcher"] == "none"
    assert found["variables"].keys().isdisjoint({"PATH", "HOME"})


def test_env_tells_who_started_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert main(["env", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["environment"]["launcher"], found["environment"]["rank"]) == ("torchrun", 0)
    assert found["variables"]["WORLD_SIZE"] == "4"


def test_env_shows_a_contradiction_as_such(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["env"]) == 0
    assert "contradict" in capfd.readouterr().out
    assert "contradict" in refused(capfd, "check").lower()


def test_which_interface_gloo_takes() -> None:
    known = {"lo": ["127.0.0.1"], "eth7": ["192.0.2.7"]}
    assert interfaces.choice_of_gloo({"GLOO_SOCKET_IFNAME": "eth7"}, known, None)[0] == "eth7"
    nothing, reason = interfaces.choice_of_gloo({"GLOO_SOCKET_IFNAME": "eth8"}, known, None)
    assert nothing == ""
    assert "eth8" in reason
    nothing, reason = interfaces.choice_of_gloo({}, known, "no-such-host.invalid")
    assert nothing == ""
    assert "no-such-host.invalid" in reason
    assert "lo" in network_interfaces.by_interface() or "lo0" in network_interfaces.by_interface()


@pytest.mark.parametrize("main_address", [None, "127.0.0.1", "192.0.2.1"])
def test_env_tells_the_interface_that_initialize_takes(main_address: str | None) -> None:
    """Towards another machine, also where this host's own name stands for a loopback address."""
    far_away = Environment("none", 0, 2, nnodes=2, main_address="192.0.2.1", main_port=1)
    taken = stores.interface_variables(far_away, None).get("GLOO_SOCKET_IFNAME", "")
    assert interfaces.choice_of_gloo({}, network_interfaces.by_interface(), main_address)[0] == taken


def test_env_shows_the_launchers_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "SLURM_JOB_ACCOUNT", "PALS_APID", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "7")
    shown = collect(os.environ)["variables"]
    assert {"SLURM_PROCID", "PALS_APID", "NCCL_DEBUG"} <= shown.keys()
    assert "SLURM_JOB_ACCOUNT" not in shown  # no detect() reads it


@pytest.mark.parametrize("variable", [None, "0", "off"])
def test_env_says_whether_ranks_can_share_memory(
    variable: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(shared_memory.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(shared_memory.VARIABLE, variable)
    try:
        reason = shared_memory.unavailable_reason()
    except idist.EnvironmentVariablesError as error:
        (reason,) = error.args
    assert variable != "0" or reason == "IGNITE_DIST_SHARED_MEMORY=0"
    assert collect(os.environ)["shared_memory"] == {"works": not reason, "reason": reason}
    assert main(["env"]) == 0
    (line,) = re.findall(r"^ *shared memory +(.*)", capfd.readouterr().out, re.MULTILINE)
    assert line.startswith(f"no: {reason}"[:30] if reason else "works")


# --- check ---------------------------------------------------------------------------------------------


def assert_is_aligned(output: str) -> None:
    """The columns of the table of dtypes stand below each other, in 80 characters."""
    lines = output.splitlines()
    (position,) = [position for position, line in enumerate(lines) if line.startswith("dtype ")]
    table = lines[position : position + 2 + len(DTYPES)]
    starts = [match.start() for match in re.finditer(r"\S+", table[0])]
    assert set(table[1]) == {"-", " "}
    for line in table[1:]:
        assert [match.start() for match in re.finditer(r"\S+", line)] == starts
    assert max(map(len, table)) <= 80


def test_check_prints_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nproc-per-node", "2"]) == 0
    output, _ = capfd.readouterr()
    assert_is_aligned(output)
    cells = {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}
    assert cells["dtype"] == [
        "SUM",
        "AVG",
        "PROD",
        "MIN",
        "MAX",
        "AND",
        "OR",
        "gather",
        "ragged",
        "broadcast",
    ]
    assert cells["float32"] == ["ok", "ok", "ok", "ok", "ok", "-", "-", "ok", "ok", "ok"]
    assert cells["int16"] == ["i32", "-", "i32", "i32", "i32", "i32", "i32", "u8", "u8", "u8"]
    assert cells["complex64"] == ["f32", "f32", "all", "-", "-", "-", "-", "u8", "u8", "u8"]
    assert cells["bool"] == ["-", "-", "-", "ok", "ok", "ok", "ok", "ok", "ok", "ok"]
    assert "All is well: 88 passed, 58 carried through another dtype, 31 refused." in output


def test_check_in_a_world_of_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nproc-per-node", "1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["ok"], report["world_size"], report["links"]) == (True, 1, [])
    outcomes = {(cell["operation"], cell["dtype"]): cell["outcome"] for cell in report["cells"]}
    assert len(outcomes) == 10 * 17 + 7
    assert outcomes["all_reduce SUM", "bool"] == "refused"
    assert outcomes["groups", ""] == "passed"


BROKEN_MODEL = """
    from ignite_dist.comp_models import NativeModel

    class BrokenModel(NativeModel):
        name = "broken-dist"
        available_backends = ("broken",)
        library = __name__

        @classmethod
        def find(cls):
            return None

        @classmethod
        def can_run(cls, backend):
            return backend == "broken"

        @classmethod
        def open(cls, backend, **kwargs):
            model = super().open("gloo", **kwargs)
            all_reduce = model.transport.all_reduce

            def broken(tensor, op, group):
                is_broken = op == "PRODUCT" and model.get_rank() == 1
                return all_reduce(tensor, op, group).then(lambda _: tensor.zero_() if is_broken else tensor)

            model.transport.all_reduce = broken
            return model
"""


@pytest.mark.long
def test_check_names_what_is_wrong_and_where(tmp_path: Path) -> None:
    write_script(tmp_path, BROKEN_MODEL, "broken_model.py")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ignite_dist.computation_models]\nbroken = broken_model:BrokenModel\n"
    )
    path = os.pathsep.join([str(tmp_path), plain_environ()["PYTHONPATH"]])
    status, output, _ = run_command("check", "--backend", "broken", PYTHONPATH=path)
    assert status == 1
    failures = re.findall(r"FAILED: (\w+ \w+) of (\w+), on rank (\d)", output)
    assert {(operation, rank) for operation, _, rank in failures} == {("all_reduce PRODUCT", "1")}
    assert {"float32", "int16"} <= {dtype for _, dtype, _ in failures}
    assert f"{len(failures)} failed: " in output


# --- ranks that do not come ----------------------------------------------------------------------------


def _missed(way: str) -> None:
    idist.initialize("gloo", timeout=timedelta(seconds=60))
    store = current_model().transport.world_store()
    assert store is not None
    steps = jobs.Steps(timedelta(seconds=60))
    jobs._GRACE_SECONDS = 2.0
    if way == "leaves in the step":
        with steps.step("the collective"):
            if idist.get_rank() == 1:
                os._exit(0)
            idist.barrier()
    elif idist.get_rank() == 1:
        store.wait(["given up"], timedelta(seconds=60))
    else:
        steps.timeout = timedelta(seconds=2)
        try:
            with steps.step("the collective"):
                pass
        finally:
            store.set("given up", "")


@pytest.mark.long
@pytest.mark.parametrize("way", ["leaves in the step", "stays away"])
def test_who_does_not_come_is_named_with_the_host(way: str) -> None:
    ended = end_of_ranks(_missed, way)[0]
    host = socket.gethostname()
    if way == "stays away":
        assert f"Before the collective: Missing: rank 1 on {host}." in ended.error
    else:
        assert re.search(rf"Rank 1 \(pid \d+ on {re.escape(host)}\) has ended without a report", ended.error)
    assert ended.seconds < 110


def test_a_rank_that_is_stuck_ends_itself(tmp_path: Path) -> None:
    source = """
        from datetime import timedelta
        from threading import Event

        from ignite_dist.cli import jobs

        jobs._GRACE_SECONDS = 0.2
        with jobs.Steps(timedelta(seconds=2)).step("an endless one"):
            Event().wait()
    """
    ended = run_python(write_script(tmp_path, source), seconds=100)
    assert ended.returncode == 1
    assert "has been in an endless one for more than 2 s" in ended.stdout


def test_a_link_that_is_slow_names_the_host_behind_it() -> None:
    def ring(*seconds: float, latency: Sequence[float] = ()) -> list[network.Link]:
        hosts = "abcdefgh"[: len(seconds)]
        return [
            network.Link((host, hosts[(i + 1) % len(hosts)]), (i, i + 1), latency[i] if latency else 1.0, one)
            for i, (host, one) in enumerate(zip(hosts, seconds, strict=True))
        ]

    assert network.slow_hosts(ring(1, 1.5, 2, 1)) == []
    assert network.slow_hosts(ring(1, 9, 9, 1)) == ["c"]  # b's other link is as good as any
    assert network.slow_hosts(ring(9, 9, 1)) == ["b"]
    assert network.slow_hosts(ring(1, 1, 1, latency=(4, 4, 1))) == ["b"]
    assert network.slow_hosts(ring(1, 1, 9, 1)) == []  # one link, not a host
    assert network.slow_hosts([]) == network.slow_hosts(ring(9, 9)[:1]) == []


def _links(hosts: list[str]) -> list[network.Link]:
    idist.initialize("gloo")
    found = network.measure(hosts)
    idist.finalize()
    return found


def test_links_are_measured_between_the_first_ranks_of_the_hosts() -> None:
    found = run_ranks(_links, ["a", "a", "b", "c"], world_size=4)
    assert found[0] == found[3]
    assert [(link.hosts, link.ranks) for link in found[0]] == [
        (("a", "b"), (0, 2)),
        (("b", "c"), (2, 3)),
        (("c", "a"), (3, 0)),
    ]
    assert all(0 < link.latency_seconds < 60 and link.megabytes_per_second > 0 for link in found[0])


# --- bench -----------------------------------------------------------------------------------------------


def test_bench_as_json_has_raw_torch_beside_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--sizes", "18,1M", "--collectives", "all_gather"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [figure["num_bytes"] for figure in report["figures"]] == [16, 1 << 20]  # whole floats of each rank
    for figure in report["figures"]:
        assert figure["seconds"] > 0
        assert figure["raw_seconds"] > 0
        speed = figure["num_bytes"] / 2 / figure["seconds"] / 1e9
        assert figure["bus_gigabytes_per_second"] == pytest.approx(speed)


def test_bench_of_rows_takes_a_dtype(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--sizes", "18,4K", "--collectives", "reduce_scatter,all_to_all", "--dtype", "bfloat16")
    assert main(["bench", "--json", *arguments]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["dtype"] == "bfloat16"
    sizes = [(figure["collective"], figure["num_bytes"]) for figure in report["figures"]]
    assert sizes == [(name, size) for name in ("reduce_scatter", "all_to_all") for size in (16, 4096)]
    for figure in report["figures"]:
        assert figure["seconds"] > 0 and figure["raw_seconds"] > 0
        assert figure["bus_bytes"] == figure["num_bytes"] / 2


def test_without_a_backend_the_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[jobs.Job] = []
    monkeypatch.setattr(jobs, "run", lambda job, *_: asked.append(job) or 0)
    monkeypatch.setattr(devices, "auto_backend", lambda: "nccl")
    for num_gpus, arguments, backend in (
        (8, "check", "nccl"),
        (8, "bench --nproc-per-node 9", "gloo"),
        (8, "check --backend gloo", "gloo"),
        (1, "bench", "gloo"),
        (1, "bench --nproc-per-node 1", "nccl"),
    ):
        monkeypatch.setattr(devices, "auto_nproc_per_node", lambda count=num_gpus: count)
        assert main(arguments.split()) == 0
        assert asked.pop().backend == backend, (num_gpus, arguments)
    monkeypatch.setattr(
        idist, "environment", lambda: Environment("torchrun", 0, 2, local_rank=0, nproc_per_node=2)
    )
    for num_gpus, backend in ((2, "nccl"), (1, "gloo")):
        monkeypatch.setattr(devices, "auto_nproc_per_node", lambda count=num_gpus: count)
        main(["check"])
        assert asked.pop().backend == backend


def test_bench_of_values_has_raw_torch_beside_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--sizes", "4,8", "--collectives", "numbers,objects"]) == 0
    report = json.loads(capfd.readouterr().out)
    figures = report["figures"]
    assert report["shared_memory"] == (not shared_memory.unavailable_reason())
    assert [(figure["collective"], figure["num_bytes"]) for figure in figures] == [
        ("numbers", 0),
        ("objects", 0),
    ]
    assert all(figure["seconds"] > 0 and figure["raw_seconds"] > 0 for figure in figures)


def _slow_on_one_rank(local_rank: int) -> int:
    tensor = torch.zeros(1)
    num_calls = 0

    def call() -> None:
        nonlocal num_calls
        num_calls += 1
        idist.broadcast(tensor)
        if num_calls == 3:  # the last of the first block: this rank alone sees that it takes long
            time.sleep(0.05 * local_rank)

    bench._time_in_turn([call], tensor)
    return num_calls


def test_all_ranks_make_as_many_calls() -> None:
    first, second = idist.spawn("gloo", _slow_on_one_rank, nproc_per_node=2, timeout=timedelta(seconds=60))
    assert first == second > 0


def _rounds(local_rank: int, longest: float) -> int:
    bench._ROW_SECONDS, bench._LONGEST_ROW_SECONDS = 1e6, longest
    return len(bench._time_in_turn([lambda: idist.broadcast(torch.zeros(1))], torch.zeros(1))[0])


@pytest.mark.parametrize(("longest", "expected"), [(0.0, bench._MIN_ROUNDS), (1e6, bench._ROUNDS)])
def test_slow_calls_have_fewer_rounds(longest: float, expected: int) -> None:
    assert idist.spawn("gloo", _rounds, (longest,), nproc_per_node=2) == [expected, expected]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bench.bus_bytes("all_reduce", 800, size) for size in (1, 2, 4)] == [0, 800, 1200]
    assert bench.bus_bytes("all_gather", 800, 4) == 600
    assert bench.bus_bytes("broadcast", 800, 4) == 800


def test_sizes() -> None:
    assert bench.parse_sizes("4:32") == (4, 8, 16, 32)
    assert bench.parse_sizes("4:64K:16") == (4, 64, 1024, 16384)
    assert bench.parse_sizes("4, 1K,2MiB,16mb") == (4, 1024, 2 << 20, 16 << 20)


# --- wrong arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("check --backend glo", "Unknown backend 'glo'. Available: 'gloo'"),
        ("check --nproc-per-node 0", "nproc_per_node must be a positive int, got 0"),
        ("check --nproc-per-node two", "invalid int value: 'two'"),
        ("check --nnodes 2", "needs node_rank"),
        ("check --master-port 65536", "must be a port"),
        ("check --timeout -1", "positive number of seconds"),
        ("check --timeout soon", "number of seconds, got soon"),
        ("check --timeout nan", "number of seconds, got nan"),
        ("check --timeout 1e-9", "number of seconds, got 1e-9"),
        ("bench --sizes 4:x", "got 'x'"),
        ("bench --sizes 64:4", "from the smallest to the largest"),
        ("bench --sizes 4:64:1", "a factor of at least 2"),
        ("bench --sizes 2", "at least 4"),
        ("bench --sizes 65G", "at most 64G"),
        (
            "bench --collectives all_reduc",
            "Allowed: all_reduce, all_gather, broadcast, barrier, numbers, objects, reduce_scatter, all_",
        ),
        ("bench --save /no/such/chart.png", "no folder /no/such"),
        ("bench --save chart.xyz", "must end in one of"),
        ("bench --save=", "must end in one of"),
        ("bentsch", "choose from"),
        ("", "required"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capfd, *arguments.split())


def test_a_chart_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "chart.png"
    folder.mkdir()
    assert "cannot be written" in refused(capfd, "bench", "--save", str(folder))


def test_a_port_in_use_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["check", "--master-port", port]) == 2
    output, said = capfd.readouterr()
    assert output == ""
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said


def test_processes_of_a_launcher_start_no_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK and WORLD_SIZE" in refused(capfd, "check", "--nproc-per-node", "2")


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _is_at_work(process: psutil.Process) -> bool:
    try:
        return process.num_threads() > 4
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "ignite_dist", "bench", "--sizes", "4:1G"]
    process = subprocess.Popen(
        command, env=plain_environ(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 100
        # Until both workers have gloo's threads, and the watchdog's; two more processes serve them.
        while len(workers := _descendants(process.pid)) < 4 or sum(map(_is_at_work, workers)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.endswith("interrupted.\n")
        assert "Traceback" not in said
        assert end_of_processes([worker.pid for worker in workers], 20) == []
    finally:
        process.kill()
        process.wait()


# --- other backends ----------------------------------------------------------------------------------------


@pytest.mark.horovod
def test_check_with_horovod() -> None:
    status, output, said = run_command("check", "--backend", "horovod")
    assert status == 0, said
    assert "0 failed" not in output
    assert "horovod, 2 processes" in output
    status, output, said = run_command("bench", "--backend", "horovod", "--sizes", "1K", "--json")
    assert status == 0, said
    assert {figure["raw_seconds"] for figure in json.loads(output)["figures"]} == {None}


@pytest.mark.xla
def test_check_with_xla() -> None:
    environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    status, output, said = run_command("check", "--backend", "xla-tpu", "--json", **environ)
    assert status == 0, said
    assert json.loads(output)["device"] == "xla"


def test_with_json_a_failure_is_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--backend", "ncl"]) == 2
    answer = json.loads(capfd.readouterr().out)
    assert answer["ok"] is False
    assert "ncl" in answer["error"]
