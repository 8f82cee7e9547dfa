from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest

import helpers
import ignite_dist as idist
from warm_client import WHOLE_EXIT


def names(text: str) -> list[str]:
    return text.split()


FACADE = names("""
    backend device available_backends model_name get_world_size get_rank get_local_rank get_nproc_per_node
    get_nnodes get_node_rank hostname set_local_rank sync initialize finalize show_config spawn Parallel
    all_reduce all_gather all_gather_tensors_with_shapes all_gather_ragged broadcast barrier new_group
    reduce gather scatter reduce_scatter all_to_all
    one_rank_only one_rank_first auto_model auto_optim auto_dataloader DistributedProxySampler
    registered_computation_models register_computation_model has_native_dist_support has_hvd_support
    has_xla_support
    is_global_zero is_local_zero world_group any_true all_true seed_everything shared_seed
    ExactSampler gather_in_order sampler_kwargs split_by_rank to_device
    unwrap_model mark_forward_method mesh model_state load_model_state optimizer_state load_optimizer_state
    DDPSyncStrategy no_sync grad_sync accumulate_gradients clip_grad_norm uneven_inputs
    compare_calls watch_for_hangs record_timeline raise_together safe_objects environment
    node_group print progress_bar average_parameters
    save_checkpoint load_checkpoint latest_checkpoint any_interrupted
""")
ERRORS = names("""
    DistributedError RankFailedError CollectiveMismatchError EnvironmentVariablesError LaunchError
    WorkerRaisedError WorkerExitedError MissingRanksError UnsafeObjectError HostLostError Work
    original_exception restart_count
""")

# What ten names were called before version 0.2.
OLD_NAMES = {
    "accumulate": "accumulate_gradients",
    "debug": "compare_calls",
    "interrupted": "any_interrupted",
    "join": "uneven_inputs",
    "latest": "latest_checkpoint",
    "original": "original_exception",
    "progress": "progress_bar",
    "split": "split_by_rank",
    "timeline": "record_timeline",
    "watch": "watch_for_hangs",
}

REQUIRED = inspect.Parameter.empty
# What a script written for ignite.distributed 0.5 may pass, by position or by name, and what it need not.
SIGNATURES: dict[str, dict[str, Any]] = {
    "DistributedProxySampler": {"sampler": REQUIRED, "num_replicas": None, "rank": None},
    "Parallel": {
        "backend": None,
        "nproc_per_node": None,
        "nnodes": None,
        "node_rank": None,
        "master_addr": None,
        "master_port": None,
        "init_method": None,
        "**": None,
    },
    "all_gather": {"tensor": REQUIRED, "group": None},
    "all_gather_tensors_with_shapes": {"tensor": REQUIRED, "shapes": REQUIRED, "group": None},
    "all_reduce": {"tensor": REQUIRED, "op": "SUM", "group": None},
    "auto_dataloader": {"dataset": REQUIRED, "**": None},
    "auto_model": {"model": REQUIRED, "sync_bn": False, "**": None},
    "auto_optim": {"optimizer": REQUIRED, "**": None},
    "available_backends": {},
    "backend": {},
    "barrier": {},
    "broadcast": {"tensor": REQUIRED, "src": 0, "safe_mode": False},
    "device": {},
    "environment": {},
    "finalize": {},
    "get_local_rank": {},
    "get_nnodes": {},
    "get_node_rank": {},
    "get_nproc_per_node": {},
    "get_rank": {},
    "get_world_size": {},
    "hostname": {},
    "initialize": {"backend": REQUIRED, "**": None},
    "model_name": {},
    "new_group": {"ranks": REQUIRED, "**": None},
    "one_rank_first": {"rank": 0, "local": False},
    "one_rank_only": {"rank": 0, "with_barrier": False},
    "set_local_rank": {"index": REQUIRED},
    "show_config": {},
    "spawn": {
        "backend": REQUIRED,
        "fn": REQUIRED,
        "args": (),
        "kwargs_dict": None,
        "nproc_per_node": 1,
        "**": None,
    },
    "sync": {"temporary": False},
}
# What ignite.distributed.utils lists in its __all__.
UTILS = names("""
    backend broadcast device available_backends model_name get_world_size get_rank get_local_rank
    get_nproc_per_node get_node_rank get_nnodes spawn initialize finalize show_config set_local_rank
    all_reduce all_gather barrier hostname has_xla_support has_native_dist_support has_hvd_support sync
    registered_computation_models one_rank_only new_group one_rank_first all_gather_tensors_with_shapes
""")


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(idist.__all__) == {*FACADE, *ERRORS} - {"print"}
    assert len(idist.__all__) == len(set(idist.__all__))
    for name in FACADE:
        assert hasattr(idist, name)


def test_a_star_import_keeps_pythons_print() -> None:
    names: dict[str, Any] = {}
    exec("from ignite_dist import *", names)
    assert "print" not in names and names["all_reduce"] is idist.all_reduce
    assert names["sync"] is idist.sync  # old scripts use it


def test_completion_offers_what_new_scripts_use() -> None:
    offered = set(dir(idist))
    assert offered < {*FACADE, *ERRORS} and {"print", "all_reduce", "Parallel"} <= offered
    assert not offered & {"sync", "show_config", "has_xla_support", "DistributedProxySampler"}
    assert not offered & set(OLD_NAMES) and set(OLD_NAMES.values()) <= offered


@pytest.mark.parametrize("old", OLD_NAMES)
def test_scripts_from_before_0_2_find_the_old_names(old: str) -> None:
    assert getattr(idist, old) is getattr(idist, OLD_NAMES[old])
    assert old not in idist.__all__


def test_every_public_function_says_what_it_is_for() -> None:
    for name in idist.__all__:
        if callable(getattr(idist, name)):
            first = (getattr(idist, name).__doc__ or "").partition("\n")[0]
            assert first.endswith((".", ":")), f"{name}: {first!r}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_scripts_for_ignite_find_their_arguments_and_defaults(name: str) -> None:
    wanted = dict(SIGNATURES[name])
    parameters = inspect.signature(getattr(idist, name)).parameters
    if wanted.pop("**", REQUIRED) is None:
        assert any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    by_position = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert {one.name: one.default for one in by_position[: len(wanted)]} == wanted
    assert [one.name for one in by_position[: len(wanted)]] == list(wanted)
    for one in by_position[len(wanted) :]:  # what is ours comes behind and may be left out
        assert one.default is not REQUIRED


def test_modules_are_attributes_after_the_one_import() -> None:
    code = "import ignite_dist as idist; print(idist.utils.get_rank(), idist.auto, idist.launcher)"
    assert helpers.run_new_python("-c", code).stdout.startswith("0 ")


def test_the_modules_that_scripts_import() -> None:
    for name in ("utils", "auto", "launcher", "comp_models", "comp_models.base", "comp_models.native"):
        importlib.import_module(f"ignite_dist.{name}")
    utils = importlib.import_module("ignite_dist.utils")
    for name in UTILS:
        assert getattr(utils, name) is getattr(idist, name)
    auto, launcher = (
        importlib.import_module("ignite_dist.auto"),
        importlib.import_module("ignite_dist.launcher"),
    )
    assert launcher.Parallel is idist.Parallel
    for name in ("auto_dataloader", "auto_model", "auto_optim", "DistributedProxySampler"):
        assert getattr(auto, name) is getattr(idist, name)


def test_support_flags_are_bools() -> None:
    for name in ("has_native_dist_support", "has_hvd_support", "has_xla_support"):
        assert type(getattr(idist, name)) is bool


PROBE = """
import gc, json, logging, os, random, sys, threading, warnings
import torch, torch.distributed
def state():
    loggers = {
        name: [len(logger.handlers), logger.level]
        for name, logger in logging.Logger.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    return {
        "environ": dict(os.environ),
        "root": [len(logging.getLogger().handlers), logging.getLogger().level],
        "loggers": {name: value for name, value in loggers.items() if value != [0, 0]},
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), repr(threading.excepthook)],
        "random": [hash(random.getstate()), torch.get_rng_state().tolist()],
        "threads": threading.active_count(),
        "filters": repr(warnings.filters),
        "cuda": torch.cuda.is_initialized(),
        "grad": torch.is_grad_enabled(),
        "omp": torch.get_num_threads(),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "context": torch.distributed.is_initialized(),
    }
modules, before = set(sys.modules), state()
import ignite_dist
after, new = state(), sorted(set(sys.modules) - modules)
changed = [key for key in before if before[key] != after[key]]
print(json.dumps({"changed": changed, "cuda": after["cuda"], "new": new}))
"""
BACKENDS = ("native", "horovod", "xla", "shared_memory")
HEAVY = [
    "horovod",
    "torch_xla",
    "mpi4py",
    "cloudpickle",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.optim",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "sympy",
    "numpy",
]


def test_importing_the_package_changes_nothing_and_imports_nothing_heavy() -> None:
    ended = helpers.run_new_python("-c", PROBE)
    assert ended.returncode == 0, ended.stdout
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["changed"] == []
    assert found["cuda"] is False
    assert "ignite_dist" in found["new"]
    for name in HEAVY:
        assert [new for new in found["new"] if f"{new}.".startswith(f"{name}.")] == []
    assert len([new for new in found["new"] if not new.startswith("ignite_dist")]) < 50
    late = ("auto", "data", "launcher", "training", "workers", *(f"comp_models.{name}" for name in BACKENDS))
    for name in late:
        assert [new for new in found["new"] if f"{new}.".startswith(f"ignite_dist.{name}.")] == []


COLLECTIONS = """
import gc, sys
large = []
gc.callbacks.append(lambda phase, about: large.append(phase) if about["generation"] == 2 else None)
import ignite_dist
print(large, "torch" in sys.modules, gc.isenabled())
"""


def test_no_collection_of_all_objects_falls_into_the_import() -> None:
    environ = helpers.plain_environ(**WHOLE_EXIT)  # in the others, none falls into torch's import
    assert helpers.run_new_python("-c", COLLECTIONS, env=environ).stdout == "[] True True\n"


WITHOUT_TORCH = """
import gc, sys
sys.modules["torch"] = None
try:
    import ignite_dist
except ImportError:
    print(gc.isenabled())
"""


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    assert helpers.run_new_python("-c", WITHOUT_TORCH).stdout == "True\n"


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="'ignite_dist' has no attribute 'all_redcue'"):
        idist.all_redcue  # noqa: B018


USE = """
import sys
import torch
import ignite_dist as idist
idist.get_rank(), idist.device(), idist.all_reduce({"a": 1, "b": torch.ones(2)}), idist.all_gather("x")
idist.auto_dataloader([1, 2, 3], batch_size=2), idist.auto_model(torch.nn.Linear(1, 1))
idist.initialize("gloo")
idist.get_rank(), idist.all_reduce(1.5), idist.all_gather(torch.ones(2), group=[0]), idist.broadcast("x")
idist.finalize()
print([name for name in sys.argv[1:] if name in sys.modules])
"""


@pytest.mark.long
def test_using_it_imports_nothing_heavy_either() -> None:
    heavy = [
        name for name in HEAVY if name.startswith(("horovod", "torch_xla", "torch._", "torch.distributed."))
    ]
    before = helpers.run_new_python(
        "-c",
        "import sys, torch, torch.utils.data; print([n for n in sys.argv[1:] if n in sys.modules])",
        *heavy,
    )
    ended = helpers.run_new_python("-c", USE, *heavy)
    assert ended.stdout.splitlines()[-1] == before.stdout.splitlines()[-1], ended.stdout


READS_NAMES_WHILE_A_THREAD_IMPORTS = """
import itertools, sys, threading
import ignite_dist as idist
ended = threading.Event()
def imports():
    for number in itertools.count():
        if ended.is_set():
            return
        sys.modules[f"module_{number}"] = sys
        if number > 100:
            del sys.modules[f"module_{number - 100}"]
sys.setswitchinterval(1e-6)
thread = threading.Thread(target=imports)
thread.start()
try:
    for name in idist.__all__:
        getattr(idist, name)
finally:
    ended.set()
    thread.join()
"""
FORKS_WHILE_A_THREAD_IMPORTS = """
import os, sys, threading, time
import torch.distributed
import ignite_dist as idist
begun = threading.Event()
class Slow:
    def find_spec(name, path=None, target=None):
        if name == "ignite_dist.comp_models.native.model":
            begun.set()
            time.sleep(0.5)
sys.meta_path.insert(0, Slow)
threading.Thread(target=idist.get_rank).start()
begun.wait()
pid = os.fork()
if pid == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


COMPILES_BEFORE_AND_AFTER_A_LATE_NAME = """
import torch
import ignite_dist as idist
def total(x):
    return idist.all_reduce(x, inplace=False) + idist.broadcast(x) * idist.get_rank()
graph = torch.compile(total, backend="eager", fullgraph=True)
graph(torch.ones(2))
idist.save_checkpoint
torch.compiler.reset()
print(graph(torch.ones(2)).tolist())
"""


def test_a_graph_holds_collectives_after_the_import_of_a_late_name_too() -> None:
    assert helpers.run_new_python("-c", COMPILES_BEFORE_AND_AFTER_A_LATE_NAME).stdout == "[1.0, 1.0]\n"


def test_names_are_used_while_another_thread_imports() -> None:
    assert helpers.run_new_python("-c", READS_NAMES_WHILE_A_THREAD_IMPORTS).returncode == 0


def test_a_fork_while_another_thread_imports_a_backend() -> None:
    # The thread may still run, and Python 3.12 and later then warn of the fork.
    ended = helpers.run_new_python("-W", "ignore::DeprecationWarning", "-c", FORKS_WHILE_A_THREAD_IMPORTS)
    assert ended.stdout == "7\n"
