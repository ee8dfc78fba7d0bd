"""Published tensor names of every parameter of the model.

One table maps a block's parameters to the published suffixes; layers,
scanned groups and experts become leading axes of a parameter, so a
parameter is described by an array of tensor names with the shape of those
axes (spec/model.md section 1.3).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from glm_jax.config import ModelConfig
from glm_jax.layer_plan import LayerPlan, layer_plan
from glm_jax.param import Axes

_BLOCK = {
  'input_norm.weight': 'input_layernorm.weight',
  'post_norm.weight': 'post_attention_layernorm.weight',
  'attention.q_a.kernel': 'self_attn.q_a_proj.weight',
  'attention.q_norm.weight': 'self_attn.q_a_layernorm.weight',
  'attention.q_b.kernel': 'self_attn.q_b_proj.weight',
  'attention.kv_a.kernel': 'self_attn.kv_a_proj_with_mqa.weight',
  'attention.kv_norm.weight': 'self_attn.kv_a_layernorm.weight',
  'attention.kv_b.kernel': 'self_attn.kv_b_proj.weight',
  'attention.o.kernel': 'self_attn.o_proj.weight',
  'indexer.wq_b.kernel': 'self_attn.indexer.wq_b.weight',
  'indexer.wk.kernel': 'self_attn.indexer.wk.weight',
  'indexer.weights_proj.kernel': 'self_attn.indexer.weights_proj.weight',
  'indexer.key_norm_weight': 'self_attn.indexer.k_norm.weight',
  'indexer.key_norm_bias': 'self_attn.indexer.k_norm.bias',
  'mlp.gate.kernel': 'mlp.gate_proj.weight',
  'mlp.up.kernel': 'mlp.up_proj.weight',
  'mlp.down.kernel': 'mlp.down_proj.weight',
  'moe.router.weight': 'mlp.gate.weight',
  'moe.router.correction_bias': 'mlp.gate.e_score_correction_bias',
  'moe.shared.gate.kernel': 'mlp.shared_experts.gate_proj.weight',
  'moe.shared.up.kernel': 'mlp.shared_experts.up_proj.weight',
  'moe.shared.down.kernel': 'mlp.shared_experts.down_proj.weight',
}
_TOP = {
  'embed': 'model.embed_tokens.weight',
  'norm.weight': 'model.norm.weight',
  'head.kernel': 'lm_head.weight',
}
_MTP = {
  'embed_norm.weight': 'enorm.weight',
  'hidden_norm.weight': 'hnorm.weight',
  'project.kernel': 'eh_proj.weight',
  'norm.weight': 'shared_head.norm.weight',
  'head.kernel': 'shared_head.head.weight',
}
SCALE_SUFFIX = '_scale_inv'  # of the tensor that holds fp8 scales
INDEXER_PART = '.self_attn.indexer.'
EMBED_NAME, HEAD_NAME = _TOP['embed'], _TOP['head.kernel']
_LAYER = re.compile(r'model\.layers\.(\d+)\.')
_EXPERT = re.compile(r'(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight')


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
  """One parameter and the tensors it is assembled from.

  Attributes:
    path: the parameter's path, e.g. 'prologue.0.input_norm.weight'.
    shape: the parameter's shape.
    dtype: the parameter's dtype.
    axes: logical axis of each dimension; None for a stacked one.
    names: tensor names; its shape is the leading axes of `shape` that
      layers and experts make, () for one tensor.
  """

  path: str
  shape: tuple[int, ...]
  dtype: np.dtype
  axes: Axes
  names: np.ndarray

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of each tensor."""
    return self.shape[self.names.ndim :]

  @property
  def is_scale(self) -> bool:
    """Whether it holds the scales of fp8 weights."""
    return self.names.flat[0].endswith(SCALE_SUFFIX)

  def tensor_index(self, place: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of the parameter that is the tensor `names[place]`."""
    lead = tuple(slice(i, i + 1) for i in place)
    return lead + tuple(slice(0, n) for n in self.tensor_shape)


def layer_prefix(layer: int) -> str:
  """Prefix of a layer's tensors; the drafter is layer `num_layers`."""
  return f'model.layers.{layer}.'


def layer_of(name: str) -> int | None:
  """The layer that a tensor belongs to; None for embedding, norm and head."""
  match = _LAYER.match(name)
  return int(match[1]) if match else None


def fused_expert(name: str) -> tuple[str, int, str] | None:
  """Where the fused layout keeps an expert's matrix.

  Args:
    name: a tensor name.

  Returns:
    The fused tensor (gate and up share one, gate first), the expert, and
    'gate', 'up' or 'down'; None if the name is not an expert's.
  """
  match = _EXPERT.fullmatch(name)
  if match is None:
    return None
  fused = 'down_proj' if match[3] == 'down' else 'gate_up_proj'
  return f'{match[1]}.{fused}', int(match[2]), match[3]


def model_leaves(model, config: ModelConfig) -> list[Leaf]:
  """Every parameter of a (possibly abstract) model with its tensor names.

  Args:
    model: a `Model`, concrete or from `abstract_model`; or parts of one under
      its field names.
    config: the configuration it was made from.

  Returns:
    Leaves in the order of `jax.tree.leaves(model)`.
  """
  plan = layer_plan(config)
  return _leaves(model, lambda p: _names(p, plan, config.moe.num_experts))


def layer_leaves(block, experts, layer: int) -> list[Leaf]:
  """The same for one layer's `(Block, Experts | None)`.

  Args:
    block: the layer's block.
    experts: a pool of this layer alone; None for a dense layer.
    layer: the layer; the drafter is layer `num_layers`.
  """

  def names(path):
    part, _, rest = path.partition('.')
    rest, scaled = _strip_scale(rest)
    suffix = SCALE_SUFFIX if scaled else ''
    if part == '0':
      return layer_prefix(layer) + _BLOCK[rest] + suffix
    return [_expert_names(layer, rest, experts.gate.shape[1], suffix)]

  return _leaves((block, experts), names)


def _leaves(tree, names_of: Callable) -> list[Leaf]:
  is_param = lambda x: isinstance(x, nnx.Param)
  out = []
  for key_path, value in jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=is_param
  )[0]:
    path = jax.tree_util.keystr(key_path, simple=True, separator='.')
    # `stack` adds leading axes that `axes` does not name.
    axes = (None,) * (len(value.shape) - len(value.axes)) + value.axes
    names = np.asarray(names_of(path), object)
    dtype = np.dtype(value.dtype)
    out.append(Leaf(path, tuple(value.shape), dtype, axes, names))
  return out


def _names(path: str, plan: LayerPlan, num_experts: int):
  """Tensor name(s) of a path: a string or nested lists of strings."""
  path, scaled = _strip_scale(path)
  suffix = SCALE_SUFFIX if scaled else ''
  if path in _TOP:
    return _TOP[path] + suffix
  top, _, rest = path.partition('.')
  if top == 'experts':
    return [
      _expert_names(i, rest, num_experts, suffix) for i in plan.moe_layers
    ]
  if top == 'prologue':
    layer, _, rest = rest.partition('.')
    return layer_prefix(int(layer)) + _BLOCK[rest] + suffix
  if top == 'groups':
    _, place, rest = rest.split('.', 2)
    first = plan.prologue + int(place)
    layers = [first + g * plan.group_size for g in range(plan.num_groups)]
    return [layer_prefix(i) + _BLOCK[rest] + suffix for i in layers]
  if top == 'mtp':
    layer = plan.num_layers
    if rest.startswith('experts.'):
      rest = rest.removeprefix('experts.')
      return [_expert_names(layer, rest, num_experts, suffix)]
    if rest.startswith('block.'):
      name = _BLOCK[rest.removeprefix('block.')]
    else:
      name = _MTP[rest]
    return layer_prefix(layer) + name + suffix
  raise KeyError(f'no published name for parameter {path!r}')


def _strip_scale(path: str) -> tuple[str, bool]:
  """The weight's path, and whether `path` is its scales."""
  if path.endswith('.scale'):
    return path.removesuffix('scale') + 'kernel', True
  if path.endswith('_scale'):
    return path.removesuffix('_scale'), True
  return path, False


def _expert_names(layer, part, num_experts, suffix) -> list[str]:
  prefix = layer_prefix(layer) + 'mlp.experts.'
  return [f'{prefix}{e}.{part}_proj.weight{suffix}' for e in range(num_experts)]
