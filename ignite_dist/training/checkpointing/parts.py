"""The arguments of ``save_checkpoint`` and ``load_checkpoint``, their states, and whether a checkpoint fits.

A part is a model, an optimizer, a scheduler or a loader, or several of a kind. A value is anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module, ModuleDict

from ignite_dist.data.passes import check_resumable
from ignite_dist.internals.arguments import kind_of
from ignite_dist.training.checkpointing.trees import as_meta, split_shards
from ignite_dist.training.state_dicts import check_optimizer_state, fitting_state
from ignite_dist.training.unwrapped_states import as_unwrapped_state, load_unwrapped_state, unwrapped_state

_ONE = ""  # the name of a single object


class Part:
    """The objects of one argument. Call :meth:`check` first: the constructor accepts anything.

    Args:
        kind: "model", "optimizer", "scheduler" or "loader".
        given: None, an object, or a dict or list of several.

    Attributes:
        kind: as given.
        is_several: True for a dict or list.
        objects: the objects by name, in an order that does not depend on that of a dict. The names in a list
            are the numbers; a single object has the name "".
    """

    def __init__(self, kind: str, given: Any) -> None:
        self.kind = kind
        self.is_several = isinstance(given, (Mapping, list, tuple)) and not hasattr(given, "state_dict")
        if self.is_several and isinstance(given, Mapping):
            self.objects = dict(sorted(given.items(), key=lambda item: str(item[0])))
        elif self.is_several:
            self.objects = {str(number): one for number, one in enumerate(given)}
        else:
            self.objects = {} if given is None else {_ONE: given}

    @property
    def is_given(self) -> bool:
        """False for None."""
        return self.is_several or bool(self.objects)

    def check(self) -> None:
        """Raise if a name or an object is not allowed. Never communicates.

        Raises:
            TypeError: an object is of another kind, or a name is not a str.
            ValueError: a name is not allowed, or a loader is one with ``exact``.
        """
        for name in self.objects if self.is_several else ():
            self._check_name(name)
        for name, one in self.objects.items():
            if self.kind == "loader":
                check_resumable(one)
            elif not _IS_ALLOWED[self.kind](one):
                where = f" as {name!r}" if self.is_several else ""
                raise TypeError(
                    f"{self.kind} must be {_NEEDED[self.kind]}, or a dict or list of several; got "
                    f"{kind_of(one)}{where}."
                )

    def _check_name(self, name: Any) -> None:
        if type(name) is not str:  # torch.load(weights_only=True) refuses an enum member in the file
            raise TypeError(f"The names in the dict {self.kind}={{...}} must be str, got {name!r}.")
        taken = {*vars(ModuleDict())} if self.kind == "model" else set()
        if not name or name in taken or (self.kind == "model" and "." in name):
            raise ValueError(
                f"{self.kind}={{...}} has the name {name!r}. A name must not be empty; that of a model must "
                "have no dot, and must not be an attribute of every module ('training', '_modules')."
            )

    def as_module(self) -> Module | None:
        """The model, or a container of several models by name; None without a model."""
        if not self.is_several:
            return self.objects.get(_ONE)
        container = ModuleDict()
        for name, one in self.objects.items():
            setattr(container, name, one)  # ModuleDict's own methods refuse names such as "train"
        return container

    def described(self) -> str:
        """The kind, and the names of several objects."""
        return _described(self.kind, list(self.objects))

    # --- the entry of a checkpoint for this part -----------------------------------------------------

    def entry(self, states: Mapping[str, Any]) -> Any:
        """The entry for the ``states`` of the objects: a dict of several, or the state of a single one."""
        return dict(states) if self.is_several else states.get(_ONE)

    def with_states(self, entry: Any) -> list[tuple[Any, Any]]:
        """Each object with its state in an entry that fits."""
        return [(one, entry[name] if self.is_several else entry) for name, one in self.objects.items()]

    def check_names(self, names_by_kind: Mapping[str, list[str]]) -> None:
        """Raise ``ValueError`` if the checkpoint was saved with other names; see :func:`names_of_several`."""
        saved = names_by_kind.get(self.kind, [_ONE])
        if self.is_given and self.objects.keys() != set(saved):
            raise ValueError(
                f"The checkpoint was saved with {_described(self.kind, saved)}, and is loaded with "
                f"{self.described()}. Pass the same."
            )


def _described(kind: str, names: Sequence[str]) -> str:
    if list(names) == [_ONE]:
        return f"one {kind}"
    return f"{kind}s {', '.join(names)}" if names else f"no {kind}"


def parts_of(**given: Any) -> dict[str, Part]:
    """The parts by kind."""
    return {kind: Part(kind, one) for kind, one in given.items()}


def names_of_several(parts: Mapping[str, Part]) -> dict[str, list[str]]:
    """The names in each part with several objects. A model's state has them already."""
    return {kind: list(part.objects) for kind, part in parts.items() if part.is_several and kind != "model"}


def _can_be_filled(value: Any) -> bool:
    """True for an object whose state can be saved and loaded; False for a class."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


_NEEDED = {
    "model": "an instance of torch.nn.Module",
    "optimizer": "a torch optimizer, or a wrapper with its methods",
    "scheduler": "an object with state_dict() and load_state_dict()",
}
_IS_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "model": lambda one: isinstance(one, Module),
    "optimizer": lambda one: _can_be_filled(one) and hasattr(one, "param_groups"),
    "scheduler": lambda one: not isinstance(one, type) and hasattr(one, "state_dict"),
}


# --- values --------------------------------------------------------------------------------------------


def state_of(name: str, value: Any) -> Any:
    """The state of an object that has one (a GradScaler, averaged weights); else ``value`` itself.

    Raises:
        TypeError: the state has sharded tensors.
    """
    if isinstance(value, type) or not hasattr(value, "state_dict"):
        return value
    state = unwrapped_state(value) if isinstance(value, Module) else value.state_dict()
    shards: dict[str, Any] = {}
    split_shards(state, name, shards)
    if shards:
        raise TypeError(
            f"{name} is {kind_of(value)} with sharded tensors. Pass it among several models or optimizers: "
            f"model={{..., {name!r}: ...}}. Or save the result of idist.model_state or idist.optimizer_state."
        )
    return state


def load_state(value: Any, state: Any) -> None:
    """The inverse of :func:`state_of`, in place."""
    if isinstance(value, Module):
        load_unwrapped_state(value, as_unwrapped_state(value, state))
    else:
        value.load_state_dict(state)


def own_states(values: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the objects in ``values``, which ``load_checkpoint`` is to fill. Every rank calls this.

    Raises:
        TypeError: a value is not an object with a state, or has sharded tensors.
    """
    for name, value in values.items():
        if not _can_be_filled(value):
            raise TypeError(
                f"load_checkpoint got {kind_of(value)} as {name}. It fills objects with state_dict() and "
                f"load_state_dict(), and returns other values: leave out {name}=, and use "
                f"load_checkpoint(...)[{name!r}]."
            )
    return {name: state_of(name, value) for name, value in values.items()}


# --- does a checkpoint fit? ----------------------------------------------------------------------------


def check_fits(
    content: dict[str, Any], parts: Mapping[str, Part], values: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    """Raise if the content of a checkpoint does not fit the objects that are to be loaded.

    Args:
        content: the content.
        parts: the parts by kind.
        values: objects with a state, by name.
        states: their :func:`own_states`.

    Raises:
        ValueError: it lacks one of them, or is of another optimizer, scheduler, loader or object.
        RuntimeError: names or shapes of a model differ.
    """
    missing = [kind for kind, part in parts.items() if part.is_given and content[kind] is None]
    missing += [name for name in values if name not in content["values"]]
    if missing:
        saved = [*(kind for kind in parts if content[kind] is not None), *content["values"]]
        raise ValueError(
            f"The checkpoint has no {' and no '.join(missing)}: it was saved with "
            f"{', '.join(saved) or 'nothing'} only. Do not pass {', '.join(missing)}."
        )
    for kind in ("optimizer", "scheduler", "loader"):
        parts[kind].check_names(content["names"])
    model = parts["model"].as_module()
    if model is not None:
        fitting_state(model, as_meta(content["model"]))
    for one, state in parts["optimizer"].with_states(content["optimizer"]):
        _check_optimizer(one, state)
    for one, state in parts["scheduler"].with_states(content["scheduler"]):
        _check_state("scheduler", one, one.state_dict(), state)
    for one, position in parts["loader"].with_states((content["loader"] or [None])[0]):
        one.check_position(position)
    for name, value in values.items():
        _check_state(name, value, states[name], content["values"][name])


def _check_state(name: str, one: Any, own: Any, saved: Any) -> None:
    if isinstance(own, dict) is not isinstance(saved, dict):
        raise ValueError(
            f"The checkpoint has {kind_of(saved)} as {name}, which is not the state of {kind_of(one)}."
        )
    if isinstance(one, Module):
        fitting_state(one, saved)
    elif hasattr(one, "param_groups"):
        _check_optimizer(one, saved)
    elif isinstance(own, dict):
        _check_keys(one, own, saved)


def _check_optimizer(optimizer: Any, state: Any) -> None:
    check_optimizer_state(optimizer, state)
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        _check_keys(optimizer, own, saved)


def _check_keys(one: Any, own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise if each has a setting that the other lacks. Another version of torch may add some."""
    missing = sorted(str(key) for key in own.keys() - saved.keys() if not str(key).startswith("_"))
    unexpected = sorted(str(key) for key in saved.keys() - own.keys() if not str(key).startswith("_"))
    if missing and unexpected:
        raise ValueError(
            f"The checkpoint does not fit {kind_of(one)}: it lacks {', '.join(missing)}, and has "
            f"{', '.join(unexpected)}."
        )
