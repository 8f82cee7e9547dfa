"""How gradients are reduced by Horovod: what is sent for them, and what is made of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Carried", "Reduction", "Wait"]

Call = tuple[int, str]  # a handle of Horovod, and the name of the call

# Waits for a call and returns its result.
Wait = Callable[[Call], Any]


class Carried:
    """A compression that loses nothing and makes of any gradient one that Horovod takes.

    It takes neither bfloat16 nor complex numbers nor what is not contiguous, and rounds float16 after every
    rank. Halves are added in float32: unlike ``all_reduce``, which adds them in float64, for half the bytes.
    """

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, torch.dtype]:
        """The gradient as it is sent, and its dtype."""
        dtype, sent = gradient.dtype, gradient
        if dtype.is_complex:
            sent = torch.view_as_real(gradient.resolve_conj())
        elif dtype is torch.bfloat16 or (dtype is torch.float16 and gradient.device.type == "cpu"):
            sent = gradient.float()
        return sent.contiguous(), dtype

    @staticmethod
    def decompress(gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient in its own dtype."""
        return torch.view_as_complex(gradient) if dtype.is_complex else gradient.to(dtype)


class Reduction:
    """How the gradients of an optimizer are reduced over a process set.

    Args:
        process_set: Horovod's.
        compression: what makes of a gradient what is sent, Horovod's or alike.
        op: Horovod's.
        gradient_predivide_factor: of an average, which part of the division comes before the sum.
        sparse_as_dense: send sparse gradients as dense ones.

    Attributes:
        is_average: whether the result is the mean.
        op: Horovod's.
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
                "gradient_predivide_factor divides an average in two steps, and op is not hvd.Average."
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

    def begin(self, name: str, gradients: Sequence[Tensor]) -> Callable[[Wait], list[Tensor]]:
        """Begin to reduce dense gradients as one. They are only read; the result's tensors are new.

        Returns:
            What waits for the results.
        """
        compressed = [self._compression.compress(one) for one in gradients]
        sent = [one.contiguous() for one, _ in compressed]
        if len(sent) == 1:
            handle = self._hvd.allreduce_async(sent[0], name=name, **self._kwargs)
        else:
            handle = self._hvd.grouped_allreduce_async(sent, name=name, **self._kwargs)

        def finish(wait: Wait) -> list[Tensor]:
            result = wait((handle, name))
            reduced = [result] if len(sent) == 1 else result
            return [
                self._compression.decompress(one, context)
                for one, (_, context) in zip(reduced, compressed, strict=True)
            ]

        return finish

    def begin_sparse(
        self, name: str, gradient: Tensor | None, parameter: Any
    ) -> Callable[[Wait], list[Tensor]]:
        """Begin to reduce a sparse gradient: its rows are gathered, and each rank adds them up.

        Args:
            name: of the call.
            gradient: None where this rank has none; then it has no rows.
            parameter: whose gradient it is.
        """
        if gradient is None:  # as of an embedding
            shape = (0, *parameter.shape[1:])
            indices, values = torch.empty(1, 0, dtype=torch.int64), parameter.new_empty(shape)
        else:
            gradient = gradient.to_sparse(1) if not gradient.is_sparse else gradient.coalesce()
            indices, values = gradient.indices(), gradient.values()
        sent, dtype = Carried.compress(values.detach())
        names = f"{name}.indices", f"{name}.values"
        rows = indices.t().to(sent.device).contiguous()
        handles = [
            self._hvd.allgather_async(one, name=its_name, process_set=self.process_set)
            for one, its_name in zip((rows, sent), names, strict=True)
        ]

        def finish(wait: Wait) -> list[Tensor]:
            all_rows, all_values = map(wait, zip(handles, names, strict=True))
            shape = (*parameter.shape, *sent.shape[values.dim() :])
            summed = torch.sparse_coo_tensor(all_rows.t(), all_values, shape).coalesce()
            count = self.process_set.size() if self.is_average else 1
            reduced = Carried.decompress(summed.values() / count, dtype)
            return [torch.sparse_coo_tensor(summed.indices(), reduced, parameter.shape, is_coalesced=True)]

        return finish
