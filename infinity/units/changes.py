"""Changes of a unit's parameters while they are attached: found where they would be lost, else kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
import xxhash
from torch import nn

from infinity.errors import UnsupportedError
from infinity.records.record import Record
from infinity.tensors import as_bytes, is_distributed, local

_version: Callable[[torch.Tensor], int] = attrgetter("_version")
_unguarded = torch._C.DisableTorchFunctionSubclass

COMPARED_EVERY = 64
"""Uses from one comparison of a unit's whole content to the next, from the first on: what changes weights
past all that torch shows, as the `.data` of a view does, does so in every step. Where few tokens are
computed, a use reads the weights about as fast as two digests do: this takes 1/32 of its time at most, and
less of a step's.
"""


class Changes:
    """Finds changes that would be lost, and refuses those that cannot be kept; see
    [Note: changes that would be lost] in attached.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], record: Record) -> None:
        """Of parameters that lie in `record`, and are not attached."""
        self.editors = 0
        """How many `gathered(..., write=True)` are under way: changes are kept."""
        self.parameters = parameters
        self._distributed = any(map(is_distributed, parameters))
        self._is_set_to = _is_set_to if self._distributed else torch.Tensor.is_set_to
        """Asked at each use, and so no call of Python's for ordinary parameters."""
        self._record = record
        self._views: list[torch.Tensor] = []
        self._counters: list[torch.Tensor] = []
        """Of DTensors, what has one version with all that were their local tensors, and no elements."""
        self._versions: list[int] = []
        self._left: list[int] = []
        self._shared: frozenset[int] = frozenset()
        """Parameters whose version others raise, too."""
        self._digests: dict[int, int] = {}

    def note_shared(self) -> None:
        """All versions were raised once since `left`."""
        raised = [one - before for one, before in zip(self._latest(), self._left, strict=True)]
        self._shared = frozenset(index for index, times in enumerate(raised) if times != 1)
        self._left = []

    def begin_edit(self) -> None:
        """Changes are kept from now on, until as many `end_edit`s."""
        self.editors += 1

    def end_edit(self) -> None:
        """Undo one `begin_edit`."""
        self.editors -= 1

    def counted(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `views` of the unit's memory as local tensors of its parameters, which have one version with
        those of before: so a change of any of them is known.
        """
        if not self._counters:
            self._counters = [torch.empty(0, dtype=one.dtype, device=one.device) for one in views]
        found = [counter.view(0) for counter in self._counters]
        for one, view in zip(found, views, strict=True):
            one.data = view  # but for the version
        return found

    def begin(self, views: list[torch.Tensor]) -> None:
        """The parameters are attached to `views`."""
        self._views, self._left = views, []
        self._versions = self._present()

    def end(self) -> None:
        """The parameters, which torch still answers for, are about to be released; of DTensors, and where a
        version is raised meanwhile, `left` follows.
        """
        self._views, self._left = [], list(map(_version, self.parameters))
        if self._digests:
            self._digests = {}

    def left(self) -> None:
        """From now on, the parameters being released, nobody changes them."""
        self._left = self._latest()

    def _latest(self) -> list[int]:
        """Return the versions of parameters that are released; of a DTensor with that of its local tensor,
        which to_local() hands out.
        """
        with _unguarded():  # a version is no value: no guard need be asked
            versions = list(map(_version, self.parameters))
        if self._counters:
            pairs = zip(versions, self._counters, strict=True)
            versions = [version + counter._version for version, counter in pairs]
        return versions

    def stepped(self, index: int) -> None:
        """A step of its optimizer has raised the version of a parameter, so that graphs of before end."""
        if self._left:
            self._left[index] += 1

    def found_since(self) -> str | None:
        """Return the name of a parameter whose version has changed since it was released, as by a view that
        was kept; None if none has, or once this was asked.
        """
        if not self._left:
            return None
        present = self._latest()
        if present == self._left:
            return None
        for index, version in enumerate(self._left):
            if present[index] != version and index not in self._shared:
                self.left()
                return self._record.unit_layout.segments[index].name
        return None

    def mark(self) -> None:
        """From now on count changes from the present values."""
        self._versions = self._present()
        self._digests = {index: self._digest(index) for index in self._digests}

    def found(self) -> str | None:
        """Return the name of a parameter changed since it was attached, or since this was asked; None if none
        was, or changes are kept.
        """
        if not self._views or self.editors:
            return None
        as_it_was = not self._digests and self._versions == self._present()
        if as_it_was and all(map(self._is_set_to, self.parameters, self._views)):  # as nearly always
            return None
        index = self._changed()
        if index is None:
            return None
        self.mark()
        return self._record.unit_layout.segments[index].name

    def _present(self) -> list[int]:
        """Return the parameters' versions; of a DTensor that of its local tensor is another one."""
        versions = list(map(_version, self.parameters))
        if self._distributed:
            pairs = zip(versions, self._views, strict=True)
            versions = [2 * version + view._version for version, view in pairs]
        return versions

    def _changed(self) -> int | None:
        present = self._present()
        for index, parameter in enumerate(self.parameters):
            if present[index] != self._versions[index] or not _is_set_to(parameter, self._views[index]):
                return index
        for index, one in self._digests.items():
            if one != self._digest(index):
                return index
        return None

    def check_forms(self) -> None:
        """See that every parameter has the shape and type of its record.

        Raises: UnsupportedError.
        """
        for index, parameter in enumerate(self.parameters):
            self._check_form(index, parameter)

    def watch_all(self) -> None:
        """Compare the content of all parameters when they are released."""
        for parameter in self.parameters:
            self.watch(parameter)

    def watch(self, parameter: nn.Parameter) -> None:
        """See attached.ChangeWatcher."""
        index = self._index(parameter)
        if self._views and not self.editors and index not in self._digests:
            self._digests[index] = self._digest(index)

    def assign(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """See attached.ChangeWatcher."""
        index = self._index(parameter)
        if not self.editors:
            raise UnsupportedError(would_be_lost(self._record.unit_layout.segments[index].name))
        self._check_form(index, values)

    def _index(self, parameter: nn.Parameter) -> int:
        return next(index for index, one in enumerate(self.parameters) if one is parameter)

    def _digest(self, index: int) -> int:
        return xxhash.xxh3_64_intdigest(as_bytes(self._views[index]))

    def _check_form(self, index: int, values: torch.Tensor) -> None:
        segment, dtype = self._record.unit_layout.segments[index], self._views[index].dtype
        values = local(values)
        if (values.shape, values.dtype) != (segment.shape, dtype):
            raise UnsupportedError(
                f"{segment.name} would become {values.dtype} of shape {tuple(values.shape)}; its record, "
                f"with master and moments, is for {dtype} of shape {segment.shape}. Nothing is written. "
                "Parameters built in Init keep their shapes and types. To resize "
                "(model.resize_token_embeddings, pruning), call infinity.save_pretrained(model, folder), "
                "and inside a new `with infinity.Init(...):` model = Model.from_pretrained(folder) and the "
                "call that resizes."
            )


def _is_set_to(parameter: nn.Parameter, view: torch.Tensor) -> bool:
    return torch.Tensor.is_set_to(local(parameter), view)


def tell_versions_apart(every: Sequence[Changes]) -> None:
    """Find out which parameters, of a whole model, have one version together, as those have that were made
    of parts of one tensor: what changes one of them is not known to have changed another.
    """
    for one in every:
        one.left()
    parameters = [parameter for one in every for parameter in one.parameters]
    torch.autograd.graph.increment_version(parameters)
    for one in every:
        one.note_shared()


def would_be_lost(name: str) -> str:
    """Return the error text for a change of the parameter `name` where changes are not kept."""
    return (
        f"{name} was changed in place, through .data or as a NumPy array, inside a forward or backward; the "
        "change would be lost. Change parameters between steps, inside `with infinity.gathered(module, "
        "write=True):`, or run this very call of the model inside it: what the forward changes is kept then."
    )


def came_too_late(name: str) -> str:
    """Return the error text for a change of the parameter `name`, which was released, by a view of it."""
    return (
        f"{name} was changed in place by a view of it (as {name}[3], its detach() or to_local()) that was "
        "kept from a forward, backward or gathered(), or through the tensor that it was made of "
        "(nn.Parameter(tensor)): its values have left that memory, and the change is lost. Change parameters "
        "between steps, inside `with infinity.gathered(module, write=True):`, and build them of a clone() of "
        "what changes later."
    )
