"""Training: steps, gradients and results, compared with hand-written code with torch or Horovod."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ignite_dist as idist
from rows import OURS, RAW, Bar, Contenders, RankRow, Row, all_gather_raw, zeros

_KB, _MB = 1 << 10, 1 << 20
_SIZES = {"1 MB": _MB, "16 MB": 16 * _MB}
_STEPS, _BATCH = 8, 64  # steps of a pass, samples of a batch over all ranks
_FEATURES, _CLASSES = 784, 10
_ITEMS = 100_000
_MICROBATCHES = (8, 5, 7, 4)  # number of samples of each microbatch
_NUM_LAYERS = 22
_SMALL_LAYERS = 100  # each has a weight and a bias


def rows() -> list[Row]:
    per_pass = f"a pass of {_STEPS} steps, 1 M parameters, batch {_BATCH}"
    grads = Bar("ratio", 0.5, label="dist.all_reduce of each .grad")
    gathers = (Bar("ratio", 1.1, label="(torch.empty + all_gather_into_tensor)"),)
    found: list[Row] = [
        RankRow(
            "training",
            per_pass,
            "ms",
            (Bar("ratio", 1.01, label="(DDP + DataLoader + DistributedSampler)"),),
            contenders=_passes,
            weight=4,
        ),
        RankRow(
            "auto_dataloader",
            f"a pass over {_ITEMS:,} items, batch {_BATCH}",
            "ms",
            (Bar("ratio", 1.02, label="(DataLoader + DistributedSampler)"),),
            contenders=_draws,
            weight=4,
        ),
        RankRow(
            "auto_dataloader",
            "make it, with a random order",
            bars=(Bar("ratio", 1.0, label="dist.all_gather_object of a small dict"),),
            contenders=_loaders,
        ),
        RankRow(
            "grad_sync", f"FORCED_SYNC of {2 * _SMALL_LAYERS} parameters", "ms", (grads,), contenders=_syncs
        ),
        RankRow(
            "accumulate_gradients",
            f"a step of {len(_MICROBATCHES)} microbatches, weight=",
            "ms",
            contenders=_accumulate,
        ),
    ]
    for name, size in _SIZES.items():
        for order in ("in order", "shuffled"):
            contenders = partial(_gather_in_order, size, shuffle=order == "shuffled")
            title = f"tensor, {name} per rank, {order}"
            found.append(RankRow("gather_in_order", title, bars=gathers, contenders=contenders))
    for name, size in _SIZES.items():
        title = f"tensor, {name} per rank, forward and backward"
        found.append(RankRow("all_gather(sync_grads)", title, contenders=partial(_gather_grads, size)))
    return found


def horovod_rows() -> list[Row]:
    models = {"1 M parameters": _perceptron, f"{_NUM_LAYERS} small layers": _deep_perceptron}
    return [
        RankRow(
            "Horovod: training",
            f"a step, {name}, batch {_BATCH}",
            "ms",
            contenders=partial(_horovod_steps, make),
            backend="horovod",
        )
        for name, make in models.items()
    ]


# --- steps -------------------------------------------------------------------------------------------


def _perceptron() -> Module:
    torch.manual_seed(0)
    return Sequential(
        Linear(_FEATURES, 1024), ReLU(), Linear(1024, 256), ReLU(), Linear(256, _CLASSES)
    )  # 1.07 M parameters


def _deep_perceptron() -> Module:
    torch.manual_seed(0)
    inner = (layer for _ in range(_NUM_LAYERS - 2) for layer in (Linear(64, 64), ReLU()))
    return Sequential(Linear(_FEATURES, 64), ReLU(), *inner, Linear(64, _CLASSES))


def _optimizer(model: Module) -> SGD:
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def _samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, _FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(_CLASSES, (count,), generator=generator))


def _passes(device: torch.device) -> Contenders:
    data = _samples(_STEPS * _BATCH)

    model = idist.auto_model(_perceptron())
    optimizer = idist.auto_optim(_optimizer(model))
    loader = idist.auto_dataloader(data, batch_size=_BATCH, shuffle=True)

    def ours() -> None:
        for batch in loader:
            x, y = idist.to_device(batch)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    raw_model = DistributedDataParallel(_perceptron().to(device))
    raw_optimizer = _optimizer(raw_model)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    raw_loader = DataLoader(data, batch_size=_BATCH // dist.get_world_size(), sampler=sampler)
    epoch = 0

    def raw() -> None:
        nonlocal epoch
        sampler.set_epoch(epoch)
        epoch += 1
        for features, classes in raw_loader:
            x, y = features.to(device), classes.to(device)
            raw_optimizer.zero_grad()
            cross_entropy(raw_model(x), y).backward()
            raw_optimizer.step()

    return {OURS: ours, RAW: raw}


def _draws(device: torch.device) -> Contenders:
    """Passes over data that costs next to nothing."""
    data = TensorDataset(torch.arange(_ITEMS))
    ours = idist.auto_dataloader(data, batch_size=_BATCH, shuffle=True, pin_memory=False)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    raw = DataLoader(data, batch_size=_BATCH // dist.get_world_size(), sampler=sampler)
    return {
        OURS: lambda: deque(ours, maxlen=0),
        RAW: lambda: deque(raw, maxlen=0),
    }


def _loaders(device: torch.device) -> Contenders:
    data = TensorDataset(torch.arange(_ITEMS))
    small, received = {"a": 1, "b": "text"}, [None] * dist.get_world_size()
    return {
        OURS: lambda: idist.auto_dataloader(data, batch_size=_BATCH, shuffle=True, pin_memory=False),
        RAW: lambda: dist.all_gather_object(received, small),
    }


def _accumulate(device: torch.device) -> Contenders:
    """A step of microbatches of different sizes: the mean over all samples of the step, on all ranks."""
    data = _samples(sum(_MICROBATCHES)).tensors
    batches = list(zip(*(tensor.to(device).split(_MICROBATCHES) for tensor in data), strict=True))

    model = idist.auto_model(_perceptron())
    optimizer = idist.auto_optim(_optimizer(model))

    def ours() -> None:
        microbatches = idist.accumulate_gradients(
            batches, model, len(batches), weight=lambda batch: len(batch[0])
        )
        for (x, y), sync in microbatches:
            with sync:
                cross_entropy(model(x), y).backward()
            if sync.is_final:
                optimizer.step()
                optimizer.zero_grad()

    raw_model = DistributedDataParallel(_perceptron().to(device))
    raw_optimizer = _optimizer(raw_model)

    def raw() -> None:
        total = torch.tensor([sum(len(x) for x, _ in batches)], dtype=torch.float64)
        dist.all_reduce(total)
        scale = dist.get_world_size() / total.item()  # DDP takes the mean over the ranks
        for number, (x, y) in enumerate(batches):
            with raw_model.no_sync() if number < len(batches) - 1 else nullcontext():
                (cross_entropy(raw_model(x), y) * (len(x) * scale)).backward()
        raw_optimizer.step()
        raw_optimizer.zero_grad()

    return {OURS: ours, RAW: raw}


def _horovod_steps(make: Callable[[], Module], device: torch.device) -> Contenders:
    import horovod.torch as hvd

    x, y = _samples(_BATCH // idist.get_world_size()).tensors
    model = idist.auto_model(make())
    raw_model = make()
    hvd.broadcast_parameters(raw_model.state_dict(), root_rank=0)
    names = [(f"raw.{make.__name__}.{name}", parameter) for name, parameter in raw_model.named_parameters()]
    raw_optimizer = hvd.DistributedOptimizer(_optimizer(raw_model), named_parameters=names)
    return {
        OURS: _step(model, idist.auto_optim(_optimizer(model)), x, y),
        RAW: _step(raw_model, raw_optimizer, x, y),
    }


def _step(model: Module, optimizer: Any, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# --- gradients ---------------------------------------------------------------------------------------


def _syncs(device: torch.device) -> Contenders:
    """The gradients exist already, so the row measures only their synchronisation."""
    model = idist.auto_model(Sequential(*(Linear(16, 16) for _ in range(_SMALL_LAYERS))))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # repeated sums of zeros stay zeros

    def ours() -> None:
        with idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC):
            pass

    def raw() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return {OURS: ours, RAW: raw}


def _gather_grads(size: int, device: torch.device) -> Contenders:
    from torch.distributed.nn.functional import all_gather

    tensor = zeros(size, device).requires_grad_()

    def backward(gathered: Tensor) -> None:
        tensor.grad = None
        gathered.sum().backward()

    return {
        OURS: lambda: backward(idist.all_gather(tensor, sync_grads=True)),
        RAW: lambda: backward(torch.cat(all_gather(tensor))),
    }


# --- results -----------------------------------------------------------------------------------------


def _gather_in_order(size: int, device: torch.device, shuffle: bool) -> Contenders:
    """Results of 1 KB per sample, for example logits of 256 classes."""
    values = zeros(size, device).view(-1, _KB // 4)
    count = len(values) * dist.get_world_size()
    loader = idist.auto_dataloader(TensorDataset(torch.empty(count)), exact=True, shuffle=shuffle)
    return {
        OURS: lambda: idist.gather_in_order(values, loader),
        RAW: lambda: all_gather_raw(torch.empty(count, _KB // 4, device=device), values),
    }
