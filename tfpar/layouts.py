"""Which axis splits which dim of which variable: rules on variable paths, and roles of layers for automatic layouts.

Rules are data: a pattern and one axis name (or None) per dim. A rule that is wrong in any way is an error, because a
rule that silently does nothing leaves a model replicated and out of memory.

Example:

>>> class Own(keras.layers.Dense):
...     pass
>>> up, down = tfpar.layouts.column(Own(32, activation="relu")), tfpar.layouts.row(Own(8))
>>> strategy = tfpar.HybridStrategy("data=2,model=2")
>>> with strategy.scope():
...     model = keras.Sequential([keras.Input((8,)), up, down])
>>> [row.layout for row in strategy.describe(model)]
[(None, 'model'), ('model',), ('model', None), (None,)]
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras

from tfpar.mesh import Mesh

Spec = tuple[str | None, ...]
_roles: weakref.WeakKeyDictionary[keras.Layer, str] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Decision:
    """A variable's layout and why it has it.

    Attributes:
        spec: one entry per dim: the axis that splits it, or None.
        reason: a few words for `describe`.
    """

    spec: Spec
    reason: str


def column(layer: keras.Layer) -> keras.Layer:
    """Declares that automatic layouts split a layer's weights by their last dim, its output features.

    Args:
        layer: a layer of any class, built or not.

    Returns:
        The layer.

    Example:

    >>> layer = tfpar.layouts.column(keras.layers.Dense(8))
    """
    _roles[layer] = "column"
    return layer


def row(layer: keras.Layer) -> keras.Layer:
    """Declares that automatic layouts split a layer's kernels by the dim before the last, its input features.

    Args:
        layer: a layer of any class, built or not. Weights of one dim, such as a bias, stay whole.

    Returns:
        The layer.

    Example:

    >>> layer = tfpar.layouts.row(keras.layers.Dense(8))
    """
    _roles[layer] = "row"
    return layer


def replicated(layer: keras.Layer) -> keras.Layer:
    """Declares that automatic layouts leave a layer's weights whole on every device.

    Args:
        layer: a layer of any class, built or not.

    Returns:
        The layer.

    Example:

    >>> layer = tfpar.layouts.replicated(keras.layers.Dense(8))
    """
    _roles[layer] = "replicated"
    return layer


def declared_roles(model: keras.Model) -> list[tuple[keras.Layer, str]]:
    """The layers of a model that have a role, the innermost first."""
    ours = {id(variable) for variable in model.variables}
    found = [(layer, role) for layer, role in _roles.items() if any(id(v) in ours for v in layer.variables)]
    return sorted(found, key=lambda item: len(item[0].variables))


def role_layout(variable: keras.Variable, role: str, axis: str, mesh: Mesh) -> Decision:
    """The layout of a variable of a layer with a declared role."""
    rank = len(variable.shape)
    dim = {"column": rank - 1, "row": rank - 2, "replicated": -1}[role]
    if dim < 0 or not variable.trainable:
        return Decision((None,) * rank, f"declared {role}")
    parts = mesh.axes.get(axis, 1)
    if variable.shape[dim] % parts:
        return Decision((None,) * rank, f"declared {role}, but {parts} does not divide its dim of {variable.shape[dim]}")
    return Decision(tuple(axis if i == dim else None for i in range(rank)), f"declared {role}")


class LayoutMap(Mapping[str, Spec]):
    """Rules from variable paths to layouts.

    A variable that no rule matches is replicated: every device holds it whole.

    Args:
        rules: regular expression to layout. The expression must match a variable's whole path (`re.fullmatch`, as in
            `keras.distribution.LayoutMap`), for example `"block_0/up/kernel"`. The layout has one entry per dim of the
            variable: the name of the mesh axis that splits the dim, or None.

    Raises:
        ValueError: an expression that does not compile, or a layout that is no tuple of axis names and None, or names
            an axis twice.

    Example:

    >>> rules = tfpar.LayoutMap({r".*up/kernel": (None, "model"), r".*down/kernel": ("model", None)})
    >>> rules[r".*up/kernel"]
    (None, 'model')
    """

    def __init__(self, rules: Mapping[str, Sequence[str | None]] = ()):
        self._rules: dict[str, Spec] = {}
        self._patterns: dict[str, re.Pattern] = {}
        for pattern, spec in dict(rules).items():
            self._rules[pattern] = _checked_spec(pattern, spec)
            try:
                self._patterns[pattern] = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"The layout rule {pattern!r} is no regular expression: {error}.") from None

    def __getitem__(self, pattern: str) -> Spec:
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"LayoutMap({self._rules!r})"

    @property
    def axes(self) -> set[str]:
        """Every axis that some rule names."""
        return {axis for spec in self._rules.values() for axis in spec if axis is not None}

    def check_axes(self, mesh: Mesh) -> None:
        """Raises ValueError for a rule that names an axis the mesh lacks."""
        for pattern, spec in self._rules.items():
            for axis in spec:
                if axis is not None and axis not in mesh.axes:
                    raise ValueError(
                        f"The layout rule {pattern!r}: {spec} names the axis {axis!r}, but the mesh {mesh} has "
                        f"{', '.join(mesh.axes)}. Use one of its axes, or add {axis!r} to the mesh."
                    )

    def match(self, path: str, shape: Sequence[int], mesh: Mesh) -> tuple[str | None, Spec]:
        """The one rule for a variable.

        Args:
            path: the variable's path, such as "block_0/up/kernel".
            shape: its shape, all dims known.
            mesh: the mesh whose axes the rules name.

        Returns:
            The pattern that matched, or None, and the layout, one entry per dim.

        Raises:
            ValueError: two rules match, or the layout's rank, axes or sizes do not fit the variable.
        """
        shape = tuple(int(dim) for dim in shape)
        found = [pattern for pattern, compiled in self._patterns.items() if compiled.fullmatch(path)]
        if len(found) > 1:
            listed = " and ".join(f"{pattern!r}: {self._rules[pattern]}" for pattern in found)
            raise ValueError(
                f"{len(found)} layout rules match the variable {path!r} of shape {shape}: {listed}. "
                "Narrow the expressions so that one is left."
            )
        if not found:
            return None, (None,) * len(shape)
        spec = self._rules[found[0]]
        _check_fit(found[0], spec, path, shape, mesh)
        return found[0], spec

    def check_all_used(self, paths: Sequence[str], already: Collection[str | None] = ()) -> None:
        """Raises ValueError for a rule that matches none of a model's variable paths and none `already` matched."""
        for pattern, compiled in self._patterns.items():
            if pattern not in already and not any(compiled.fullmatch(path) for path in paths):
                near = difflib.get_close_matches(re.sub(r"[\\^$.*+?()\[\]{}|]", "", pattern), paths, n=3, cutoff=0.3)
                raise ValueError(
                    f"The layout rule {pattern!r}: {self._rules[pattern]} matches no variable of the model, whose paths "
                    f"include {', '.join(near or list(paths)[:3]) or 'nothing'}. An expression must match the whole path "
                    "(for example r'.*up/kernel'); [v.path for v in model.variables] lists all."
                )


def _checked_spec(pattern: str, spec: Sequence[str | None]) -> Spec:
    is_sequence = isinstance(spec, (tuple, list)) and all(axis is None or isinstance(axis, str) for axis in spec)
    if not is_sequence:
        raise ValueError(
            f"The layout rule {pattern!r} has the layout {spec!r}; write a tuple with an axis name or None per dim, "
            'such as (None, "model").'
        )
    for axis in spec:
        if axis is not None and list(spec).count(axis) > 1:
            raise ValueError(
                f"The layout rule {pattern!r}: {tuple(spec)} splits two dims by the axis {axis!r}; an axis can split one."
            )
    return tuple(spec)


def _check_fit(pattern: str, spec: Spec, path: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    rule = f"The layout rule {pattern!r}: {spec}"
    if len(spec) != len(shape):
        raise ValueError(
            f"{rule} has {len(spec)} entries, but the variable {path!r} has the shape {shape}, {len(shape)} "
            f"dim{'s' * (len(shape) != 1)}. Give one axis name or None per dim."
        )
    for dim, (axis, size) in enumerate(zip(spec, shape)):
        if axis is not None and size % mesh.axes[axis]:
            raise ValueError(
                f"{rule} splits dim {dim} of the variable {path!r}, shape {shape}, by the axis {axis!r} of size "
                f"{mesh.axes[axis]}, which does not divide {size}. Split another dim, leave it None, or change the model's "
                f"width to a multiple of {mesh.axes[axis]}."
            )
