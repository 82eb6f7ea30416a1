"""What a module was before ranks cut its networks, so that it can be made whole again after a run.

Noted are classes, children, attributes and the names of weights, and of weights the shapes alone. `restored` puts these
back around whole weights, which ranks gather first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_megatron.any_module.cut_model import CutModel, cut_of
from lightning_megatron.sharding import ShardedParameter

_UNCUT = "_lightning_megatron_uncut"
_PACKAGE = __name__.partition(".")[0]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_KINDS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_WEIGHTS = ("_parameters", "_buffers")
_APART = {*_HOOKS, *_HOOK_KINDS, *_WEIGHTS, "_modules", "training", _UNCUT}
"""What a module keeps of itself otherwise than as attributes that the cut sets."""
_NONE = object()


@dataclass
class _Weight:
    """A parameter or buffer without its values; `names` are all that it has."""

    is_parameter: bool
    names: list[str]


class _Before:
    """One module: its class, its attributes and children by identity, and its weights without values."""

    def __init__(self, name: str, module: nn.Module, weights: dict[str, dict[str, _Weight | None]]) -> None:
        self.name, self.module, self.weights = name, module, weights
        self.kind: type[nn.Module] | None = type(module)
        self.attributes, self.children = _attributes(module), dict[str, Any](module._modules)

    def keep_changes(self) -> None:
        """Forgets what is as it was: what a user sets during a run stays."""
        self.kind = None if self.kind is type(self.module) else self.kind
        self.attributes = _changed(self.attributes, _attributes(self.module))
        self.children = _changed(self.children, self.module._modules)

    def restore(self, full: Mapping[str, Tensor], now: "Now", made: dict[int, Tensor]) -> None:
        if self.kind is not None:
            self.module.__class__ = self.kind
        _put_back(vars(self.module), self.attributes)
        _put_back(self.module._modules, self.children)
        for table, weights in self.weights.items():
            held = vars(self.module)[table]
            given = {key: _value(one, full, now, made) for key, one in weights.items() if one is not None}
            none = {key: None for key, one in weights.items() if one is None}
            found = {**none, **held, **{key: one for key, one in given.items() if one is not None}}
            # In their order: optimizers and files go by it. A user may have taken some out.
            order = [key for key in {**dict.fromkeys(weights), **held} if key in found]
            vars(self.module)[table] = {key: found[key] for key in order}
        self.module.training = now.are_training.get(self.name, self.module.training)


@dataclass
class Now:
    """What users may have set since the cut, of all ranks."""

    are_trained: dict[str, bool]
    """Whether a parameter requires gradients, by its first name."""
    are_training: dict[str, bool]
    """The mode of each module by its name, also of modules that stand for others."""

    @staticmethod
    def merged(own: "Iterable[Now]") -> "Now":
        """What is known on some rank."""
        merged = Now({}, {})
        for one in own:
            merged.are_trained |= one.are_trained
            merged.are_training |= one.are_training
        return merged


class Uncut:
    """The networks of a module as they are before they are cut; `was_held` says whether this rank has all values."""

    def __init__(self, module: nn.Module, *, was_held: bool = True) -> None:
        self.was_held = was_held
        self._weights: dict[str, _Weight] = {}
        found: dict[int, _Weight] = {}
        self._modules: list[_Before] = []
        for prefix, child in module.named_modules():
            start = f"{prefix}." if prefix else ""
            weights = {
                table: {key: self._noted(f"{start}{key}", one, found) for key, one in vars(child)[table].items()}
                for table in _WEIGHTS
            }
            self._modules.append(_Before(prefix, child, weights))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Uncut":
        # A copy of a module has modules of its own, of which this knows nothing.
        return Uncut(nn.Module())

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncut, (nn.Module(),)

    def _noted(self, name: str, one: Tensor | None, found: dict[int, _Weight]) -> _Weight | None:
        if one is None:
            return None
        new = _Weight(isinstance(one, nn.Parameter), [])
        weight = self._weights[name] = found.setdefault(id(one), new)
        weight.names.append(name)
        return weight

    def keep_changes(self, module: nn.Module) -> None:
        """Notes what the cut changed, and takes the weights out of modules that others stand for now."""
        held = {id(child) for child in module.modules()}
        for before in self._modules:
            before.keep_changes()
            if id(before.module) not in held:
                for table in _WEIGHTS:
                    vars(before.module)[table] = {}

    def parts(self, module: nn.Module) -> dict[str, Tensor]:
        """What this rank has of each weight or buffer that was there before the cut, by its first name."""
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {self._weights[name].names[0]: one for name, one in named if name in self._weights and not one.is_meta}

    def now(self, module: nn.Module) -> Now:
        """What this rank knows of what users may have set."""
        trained = {name: one.requires_grad for name, one in self.parts(module).items()}
        return Now(trained, {name: child.training for name, child in module.named_modules()})

    def names(self) -> set[str]:
        """First names of all weights and buffers."""
        return {weight.names[0] for weight in self._weights.values()}

    def restore(self, module: nn.Module, full: Mapping[str, Tensor], now: Now) -> None:
        """Makes the networks what they were, with whole weights by their first names; others stay as they are."""
        held = dict(module.named_modules())
        for child in list(module.modules()):
            cut = cut_of(child)
            if isinstance(cut, CutModel):
                cut.tokens.give_back()
            _drop_own_hooks(child)
        made: dict[int, Tensor] = {}
        for before in self._modules:
            stand_in = held.get(before.name)
            if stand_in is not None and stand_in is not before.module:
                # Hooks that a user has set on it since; a module with hooks is not cut.
                for table in (*_HOOKS, *_HOOK_KINDS):
                    vars(before.module)[table] = vars(stand_in)[table]
            before.restore(full, now, made)


def is_whole(weight: Tensor) -> bool:
    """Whether a weight is as it was before a cut."""
    return not isinstance(weight, ShardedParameter) and not weight.is_meta


def _value(weight: _Weight, full: Mapping[str, Tensor], now: Now, made: dict[int, Tensor]) -> Tensor | None:
    values = full.get(weight.names[0])
    if values is None:
        return None
    if id(weight) not in made:
        is_trained = now.are_trained[weight.names[0]]
        made[id(weight)] = nn.Parameter(values, is_trained) if weight.is_parameter else values
    return made[id(weight)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _APART}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What was there of that which is another now, by key; what was not there is marked."""
    pairs = {key: (before.get(key, _NONE), now.get(key, _NONE)) for key in {**before, **now}}
    return {key: was for key, (was, is_now) in pairs.items() if was is not is_now}


def _put_back(held: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key, value in before.items():
        if value is _NONE:
            held.pop(key, None)
        else:
            held[key] = value


def _drop_own_hooks(module: nn.Module) -> None:
    """Takes out of a module the hooks that are this package's."""
    for table in _HOOKS:
        hooks: dict[int, Any] = vars(module)[table]
        for key in [key for key, hook in hooks.items() if _is_own(hook)]:
            del hooks[key]
            for kinds in _HOOK_KINDS:
                vars(module)[kinds].pop(key, None)


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    home = getattr(hook, "__module__", "") if owner is None else type(owner).__module__
    return str(home).partition(".")[0] == _PACKAGE


def note_uncut(module: nn.Module, uncut: Uncut) -> None:
    """Keeps with a module what it was before its networks were cut."""
    uncut.keep_changes(module)
    module.__dict__.setdefault(_UNCUT, []).append(uncut)


def was_held(module: nn.Module) -> bool:
    """Whether this rank held the whole of the networks that were cut, of which there are some."""
    known: list[Uncut] = module.__dict__.get(_UNCUT, [])
    return any(uncut.names() for uncut in known) and all(uncut.was_held for uncut in known)


def take_uncut(module: nn.Module) -> list[Uncut]:
    """What a module was before each of its cuts, the last one first; from now on it is not known any more."""
    found: Iterable[Uncut] = module.__dict__.pop(_UNCUT, ())
    return list(reversed(list(found)))
