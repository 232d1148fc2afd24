"""Forward-pass timing: which modules the optimizer trains from the top, and the time of calls to them.

Global module hooks would put every call of every small module on torch's slow path, and hooks on an instance
travel with it when it is pickled. So the outermost modules are looked up once, after the first optimizer
step, and the `__call__` of their classes is replaced; calls below them cost one comparison.

What runs in every step is written flat: a function called between two operations of torch costs microseconds.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.loop import EVALUATED
from stoker.watch.inside.switch import ident, now, unseen

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

_GRADIENTS = 3  # after which modules are looked up without an optimizer: none of torch's may ever step
_PATIENCE = 3  # steps after which a root that was never called is looked through to its children


class Roots:
    """The modules at the top of what is trained."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._roots: list[Any] = []  # weak references to modules
        self._optimizers = weakref.WeakSet[Any]()
        self._training = weakref.WeakSet[Any]()  # iterators of whose batches a gradient was taken
        self._called = False
        self._gradients = 0  # that were taken before any optimizer stepped
        self._steps_until_children = _PATIENCE
        self._anew()
        os.register_at_fork(after_in_child=self._anew)

    def _anew(self) -> None:
        """What the hooks look at in every step. Of a forked child they look again: it has files to open."""
        self.fetched: Any = _nothing  # a weak reference to the iterator of the last batch
        self.settled: Any = _nothing  # one to the optimizer whose modules are known and called
        self.trained = False  # a gradient was taken of that iterator's batches
        self.join(1)

    def join(self, ranks: int) -> None:
        """A process group of so many."""
        self.ranks = ranks
        self.plain = (
            False  # of a backward there is nothing to find out: its batch trains, and there is one rank
        )

    def evaluating(self, iterator: Any) -> bool:
        """Is a batch asked for now one to evaluate on? Gradients are off, or the model is in that mode and
        the iterator is not one that trains: some fetch a training batch before they leave the mode."""
        if self.fetched() is not iterator:
            self.fetch(iterator)
        return not sys.modules["torch"].is_grad_enabled() or (not self.trained and self.in_evaluation())

    def fetch(self, iterator: Any) -> None:
        """A batch is asked for of another iterator than the last one was."""
        self._probe.begin()
        self.fetched, self.trained = weakref.ref(iterator), iterator in self._training
        self.plain = self.trained and self.ranks == 1

    def in_evaluation(self) -> bool:
        root = self._roots[0]() if self._roots else None
        return root is not None and not root.training

    def trains(self) -> None:
        """A gradient is taken: the last batch was one to train on, whatever mode the model is in. Needs not
        be called while `plain` is set."""
        self._probe.begin()
        self._gradients += 1
        if self._gradients == _GRADIENTS and not self._optimizers:
            self._probe.loop.thread = ident()
            self._watch_roots(lambda parameter: bool(parameter.requires_grad))
            if not _instances(sys.modules["torch"].optim.Optimizer):
                self._probe.loop.believe_cycles()
        iterator = self.fetched()
        if iterator is not None:
            self._training.add(iterator)
            settled = bool(self._optimizers) or self._gradients >= _GRADIENTS
            self.trained, self.plain = True, settled and self.ranks == 1

    def steps(self) -> bool:
        """Has an optimizer stepped?"""
        return bool(self._optimizers)

    def stepped(self, optimizer: Any) -> None:
        """After an optimizer step: look up the modules of one not seen before. Needs not be called for the
        one that is `settled`."""
        self._probe.begin()
        self._probe.loop.thread = ident()
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._look_up(optimizer)
        elif self._is_called() or not self._steps_until_children:
            self.settled = weakref.ref(optimizer)
        else:
            self._steps_until_children -= 1
            if not self._steps_until_children:
                self._watch_children()

    def _is_called(self) -> bool:
        if not self._called:
            self._probe.read_marks()
            self._called = self._probe.loop.calls_model
        return self._called

    def _look_up(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._probe.tell(params=self._probe.meta.get("params", 0) + sum(p.numel() for p in parameters))
        self._tell_card()
        known = {id(parameter) for parameter in parameters}
        self._watch_roots(lambda parameter: id(parameter) in known)

    def _watch_roots(self, trained: Callable[[Any], bool]) -> None:
        for module in roots_of(trained):
            if all(known() is not module for known in self._roots):
                self._roots.append(weakref.ref(module))
                self._watch(type(module), "__call__")
                if callable(getattr(type(module), "training_step", None)):  # Lightning calls it, not forward
                    self._watch(type(module), "training_step")

    def _watch_children(self) -> None:
        for root in filter(None, (reference() for reference in self._roots)):
            for child in root.children():
                self._watch(type(child), "__call__")

    def _watch(self, model: type, name: str) -> None:
        """Replace a method on the class, where it is not already ours."""
        found = getattr(model, name)
        if hasattr(found, "_stoker"):
            return
        # Of another class it is looked up at each call: torch.fx replaces Module.__call__ while it traces.
        owner = next(one for one in model.__mro__ if name in vars(one))
        methods = {name: found} if owner is model else vars(owner)
        put, is_compiling, is_root = self._probe.marks.append, _is_compiling(), self._is_root
        takes_gradients = sys.modules["torch"]._C.is_grad_enabled
        inside = 0  # the thread that is in the outermost call; of several threads, the last to come

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if is_compiling():  # first of all: what torch.compile traces must find nothing of ours
                return methods[name](*args, **kwargs)
            thread = ident()
            if thread == inside:
                return methods[name](*args, **kwargs)
            kind, before, inside, note = "forward", inside, thread, 0
            if not takes_gradients() and is_root(args[0]):
                note = EVALUATED
            start = now()
            try:
                return methods[name](*args, **kwargs)
            finally:
                put((kind, start, now(), thread, 0, note))
                inside = before

        call.__name__, call.__doc__ = name, found.__doc__
        call.__wrapped__ = found  # type: ignore[attr-defined]  # so that its signature is still seen
        call._stoker = True  # type: ignore[attr-defined]
        setattr(model, name, unseen(call))

    def _is_root(self, module: Any) -> bool:
        """Is this what is trained, in its evaluation mode? A teacher may be of the same class."""
        return not getattr(module, "training", True) and any(one() is module for one in self._roots)

    def _tell_card(self) -> None:
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            self._probe.card = torch.cuda.current_device()
            self._probe.tell(gpu=physical_card(self._probe.card))


def _nothing() -> None:
    """A weak reference to nothing."""


def roots_of(trained: Callable[[Any], bool]) -> list[Any]:
    """Modules that hold parameters of this kind and are no part of another module."""
    modules = [one for one in _instances(sys.modules["torch"].nn.Module) if "_modules" in vars(one)]
    children = {id(child) for module in modules for child in module._modules.values()}
    tops = [module for module in modules if id(module) not in children]
    return [top for top in tops if any(map(trained, top.parameters()))]


def _instances(kind: type) -> list[Any]:
    """Everything of a kind that lives. By type, not isinstance: that asks proxies for their class, and some
    answer by importing things. And in a set: of the eight million objects a heap may have, each takes 40 ns
    and not half a microsecond."""
    kinds = set(_with_subclasses(kind))
    return [one for one in gc.get_objects() if type(one) in kinds]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for one in subclasses:
        yield from _with_subclasses(one)


def physical_card(index: int) -> int | None:
    """The card's number on its machine: CUDA_VISIBLE_DEVICES renumbers them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        return index
    return int(names[index]) if index < len(names) and names[index].isdigit() else None


def _is_compiling() -> Any:
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return getattr(compiler, "is_dynamo_compiling", lambda: False)
