"""Where arrays live: logical axes to tuples of mesh axes, by one table.

Logical axes stand beside each weight (`glm_jax.param`). The table below is
the only place where they meet the mesh. It puts every matrix over all chips:
one of its axes over `data` and `context`, the other over `model`. Vectors
(norms, the router's bias) and block scales are small and whole everywhere.

    vocab        ids of embedding and head
    embed        the residual stream's features
    fsdp         the input side of a weight whose output is by head
    heads        attention heads, output side of q_b and kv_b, input of o
    index        index heads; features of the index key
    rank         latent ranks, output side of q_a and kv_a
    mlp          hidden features of dense and shared MLPs
    expert       routed experts
    expert_mlp   hidden features of one routed expert
    router       the router's outputs
    rows         (sequence, position) rows of a step
    tokens       pages of the latent cache
    index_tokens pages of the index-key cache
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.mesh import AXES, CONTEXT, DATA, MODEL, ways

TABLE: dict[str, tuple[str, ...]] = {
  'vocab': (MODEL,),
  'embed': (DATA, CONTEXT),
  'fsdp': (DATA, CONTEXT),
  'heads': (MODEL,),
  'index': (MODEL,),
  'rank': (MODEL,),
  'mlp': (MODEL,),
  'expert': (DATA, CONTEXT),
  'expert_mlp': (MODEL,),
  'router': (MODEL,),
  'rows': (DATA, CONTEXT),
  'tokens': (DATA, CONTEXT),
  'index_tokens': (DATA, CONTEXT, MODEL),
}


@dataclasses.dataclass(frozen=True)
class Rules:
  """One table of logical axes; immutable and hashable.

  Attributes:
    table: pairs of a logical axis and the mesh axes it is split over.
  """

  table: tuple[tuple[str, tuple[str, ...]], ...] = tuple(TABLE.items())

  def __post_init__(self):
    names = [name for name, _ in self.table]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
      raise ValueError(f'logical axes {sorted(twice)} have two rules: keep one')
    for name, axes in self.table:
      unknown = set(axes) - set(AXES)
      if unknown or len(set(axes)) < len(axes):
        raise ValueError(
          f'rule {name!r} -> {axes}: use each of the mesh axes {AXES} at most '
          'once'
        )

  def replace(self, **changes: Sequence[str]) -> Rules:
    """The table with some rules changed or added."""
    table = dict(self.table) | {k: tuple(v) for k, v in changes.items()}
    return Rules(tuple(table.items()))

  def axes(self, name: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis, () for None.

    Raises:
      ValueError: the table has no such axis.
    """
    if name is None:
      return ()
    for key, axes in self.table:
      if key == name:
        return axes
    raise ValueError(
      f'logical axis {name!r} has no rule; there are '
      f'{sorted(key for key, _ in self.table)}'
    )

  def spec(
    self, axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh
  ) -> PartitionSpec:
    """How an array is split.

    Args:
      axes: logical axis of each of its last dimensions; dimensions before
        those are whole (layers).
      shape: its shape.
      mesh: the mesh.

    Returns:
      One entry a dimension; mesh axes of size 1 are left out.

    Raises:
      ValueError: two dimensions want the same mesh axis, or a size does not
        divide; both are named.
    """
    lead = len(shape) - len(axes)
    entries: list[tuple[str, ...] | None] = [None] * lead
    taken: dict[str, str] = {}  # mesh axis -> logical axis
    for name, size in zip(axes, shape[lead:]):
      wanted = tuple(a for a in self.axes(name) if mesh.shape[a] > 1)
      for axis in wanted:
        if axis in taken:
          raise ValueError(
            f'logical axes {taken[axis]!r} and {name!r} of {tuple(axes)} both '
            f'want the mesh axis {axis!r}: change one of their rules'
          )
        taken[axis] = name
      parts = ways(mesh, wanted)
      if size % parts:
        raise ValueError(
          f'logical axis {name!r} of size {size} in shape {tuple(shape)} does '
          f'not divide over {"x".join(wanted)}={parts}: use another mesh or '
          'another rule'
        )
      entries.append(wanted or None)
    return PartitionSpec(*entries)

  def sharding(
    self, axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh
  ) -> NamedSharding:
    """`spec` as a sharding."""
    return NamedSharding(mesh, self.spec(axes, shape, mesh))


DEFAULT = Rules()


def parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
  """Path and parameter of a (possibly abstract) module."""
  is_param = lambda x: isinstance(x, nnx.Variable)
  for path, value in jax.tree_util.tree_flatten_with_path(
    module, is_leaf=is_param
  )[0]:
    yield jax.tree_util.keystr(path, simple=True, separator='.'), value


def module_shardings(
  module: nnx.Module, mesh: Mesh, rules: Rules = DEFAULT
) -> nnx.Module:
  """A pytree like `module` with the sharding of each parameter.

  Args:
    module: a model or part of one, concrete or abstract.
    mesh: the mesh.
    rules: the table.

  Returns:
    The same tree; leaves are `NamedSharding`.

  Raises:
    ValueError: a clash or an indivisible size, with the parameter's path.
  """
  out = []
  for path, value in parameters(module):
    try:
      out.append(rules.sharding(value.axes, value.shape, mesh))
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from None
  return jax.tree.unflatten(jax.tree.structure(module), out)


def abstract_sharded(
  module: nnx.Module, mesh: Mesh, rules: Rules = DEFAULT
) -> nnx.Module:
  """An abstract module whose leaves carry shardings, for AOT compilation."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    module,
    module_shardings(module, mesh, rules),
  )


def shard_bytes(
  module: nnx.Module, mesh: Mesh, rules: Rules = DEFAULT
) -> Mapping[str, int]:
  """Bytes that one device holds of each parameter, by path."""
  shardings = jax.tree.leaves(module_shardings(module, mesh, rules))
  out = {}
  for (path, value), sharding in zip(parameters(module), shardings):
    local = sharding.shard_shape(tuple(value.shape))
    size = value.dtype.itemsize
    for n in local:
      size *= n
    out[path] = size
  return out
