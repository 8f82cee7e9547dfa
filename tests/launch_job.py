"""``python launch_job.py LAUNCHER OUT [FAILING]``: launchers that call a function, here ``job.main``."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import ignite_dist as idist
from job import main


def ray(config: dict[str, Any]) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its daemons end a little later
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        try:
            TorchTrainer(
                main,
                train_loop_config=config,
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=f"{folder}/results"),
            ).fit()
        finally:
            ray.shutdown()


def fabric(config: dict[str, Any], strategy: str = "ddp") -> None:
    from lightning_fabric import Fabric

    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(_in_fabric, config)


def fabric_spawn(config: dict[str, Any]) -> None:
    fabric(config, "ddp_spawn")


def _in_fabric(fabric: Any, config: dict[str, Any]) -> None:
    main(config)


def spawn(config: dict[str, Any]) -> None:
    idist.spawn("gloo", _in_worker, (config,), nproc_per_node=2)


def _in_worker(local_rank: int, config: dict[str, Any]) -> None:
    main(config)


if __name__ == "__main__":
    launcher, out, *failing = sys.argv[1:]
    globals()[launcher]({"out": out, "failing": int(failing[0]) if failing else None})
