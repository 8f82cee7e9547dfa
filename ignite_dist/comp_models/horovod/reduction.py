"""Reduces gradients with Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = tuple[int, str]  # Horovod's handle, and the name of the call

# Waits for a call and returns its result.
WaitForCall = Callable[[Call], Any]


class Carried:
    """A lossless compression that converts a gradient to a dtype and layout that Horovod supports.

    Horovod does not support bfloat16, complex or non-contiguous tensors, and rounds float16 on CPU after each
    addition. So bfloat16, and float16 on CPU, are sent as float32 (``all_reduce`` sends float64).
    """

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor to send, and the dtype of the gradient."""
        dtype, sent = gradient.dtype, gradient
        if dtype.is_complex:
            sent = torch.view_as_real(gradient.resolve_conj())
        elif dtype is torch.bfloat16 or (dtype is torch.float16 and gradient.device.type == "cpu"):
            sent = gradient.float()
        return sent.contiguous(), dtype

    @staticmethod
    def decompress(gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert the result to ``dtype``, the dtype of the gradient."""
        return torch.view_as_complex(gradient) if dtype.is_complex else gradient.to(dtype)


class Reduction:
    """Reduces an optimizer's gradients over a process set.

    Args:
        process_set: a process set of Horovod.
        compression: a compressor such as ``hvd.Compression.fp16``.
        op: an operation of Horovod, such as ``hvd.Average``.
        gradient_predivide_factor: an average divides by this factor before the sum.
        sparse_as_dense: convert sparse gradients to dense tensors.

    Attributes:
        is_average: True if ``op`` is ``hvd.Average``.
    """

    def __init__(
        self,
        process_set: Any,
        compression: Any,
        op: Any,
        gradient_predivide_factor: float,
        sparse_as_dense: bool,
    ) -> None:
        import horovod.torch as hvd

        if gradient_predivide_factor != 1.0 and op != hvd.Average:
            raise ValueError(
                "gradient_predivide_factor needs op=hvd.Average: it splits the division of an average."
            )
        self._hvd = hvd
        self.process_set = process_set
        self.sparse_as_dense = sparse_as_dense
        self.is_average = op == hvd.Average
        self.op = op
        self._compression = compression
        self._kwargs: dict[str, Any] = {"op": op, "process_set": process_set}
        if gradient_predivide_factor != 1.0:
            self._kwargs["prescale_factor"] = 1.0 / gradient_predivide_factor
            self._kwargs["postscale_factor"] = gradient_predivide_factor

    def begin(self, name: str, gradients: Sequence[Tensor]) -> Callable[[WaitForCall], list[Tensor]]:
        """Begin to reduce dense gradients in one call. The gradients are not changed.

        Returns:
            A function that waits for the call and returns new tensors.
        """
        compressed = [self._compression.compress(one) for one in gradients]
        sent = [one.contiguous() for one, _ in compressed]
        if len(sent) == 1:
            handle = self._hvd.allreduce_async(sent[0], name=name, **self._kwargs)
        else:
            handle = self._hvd.grouped_allreduce_async(sent, name=name, **self._kwargs)

        def finish(wait: WaitForCall) -> list[Tensor]:
            result = wait((handle, name))
            reduced = [result] if len(sent) == 1 else result
            return [
                self._compression.decompress(one, context)
                for one, (_, context) in zip(reduced, compressed, strict=True)
            ]

        return finish

    def begin_sparse(
        self, name: str, gradient: Tensor | None, parameter: Any
    ) -> Callable[[WaitForCall], list[Tensor]]:
        """Begin to reduce a sparse gradient: gather the rows of all ranks, then add the rows on each rank.

        Args:
            name: equal on all ranks.
            gradient: None if this rank has no gradient and sends no rows.
            parameter: the parameter of the gradient.
        """
        if gradient is None:  # send an empty gradient, with the layout of an embedding's gradient
            shape = (0, *parameter.shape[1:])
            indices, values = torch.empty(1, 0, dtype=torch.int64), parameter.new_empty(shape)
        else:
            gradient = gradient.to_sparse(1) if not gradient.is_sparse else gradient.coalesce()
            indices, values = gradient.indices(), gradient.values()
        sent, dtype = Carried.compress(values.detach())
        names = f"{name}.indices", f"{name}.values"
        rows = indices.t().to(sent.device).contiguous()
        handles = [
            self._hvd.allgather_async(one, name=call_name, process_set=self.process_set)
            for one, call_name in zip((rows, sent), names, strict=True)
        ]

        def finish(wait: WaitForCall) -> list[Tensor]:
            all_rows, all_values = map(wait, zip(handles, names, strict=True))
            shape = (*parameter.shape, *sent.shape[values.dim() :])
            summed = torch.sparse_coo_tensor(all_rows.t(), all_values, shape).coalesce()
            count = self.process_set.size() if self.is_average else 1
            reduced = Carried.decompress(summed.values() / count, dtype)
            return [torch.sparse_coo_tensor(summed.indices(), reduced, parameter.shape, is_coalesced=True)]

        return finish
