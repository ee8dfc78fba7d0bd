"""Cases of suite `layer`, and the numbers that both frameworks are given.

A layer is GLM-5.2's decoder layer without its MLP: norm, projections, rotary
embedding, cache write, indexer (full layers), selection, attention, output
projection, residual. `decode` computes the last of `context` tokens of each
sequence, `prefill` all of them from an empty cache.

Imports NumPy only: the PyTorch process loads no jax. Weights and inputs come
from seeds, so that every process makes the same ones.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from glm_jax.config import FULL, ModelConfig
from glm_jax.presets import PRESETS

KINDS = ('full', 'shared')
JAX = 'jax'
TORCH = ('torch_eager', 'torch_sdpa', 'torch_static')
SYSTEMS = (JAX, *TORCH)
TINY = 'tiny'
_SIZES = {'8k': 8192, '32k': 32768, '128k': 131_072, '512k': 524_288}


@dataclasses.dataclass(frozen=True)
class LayerCase:
  """One step of one layer.

  Attributes:
    name: as in 'decode_128k_b8'.
    phase: 'decode' or 'prefill'.
    context: tokens of each sequence, the step's included.
    batch: sequences.
    preset: of the model's numbers.
  """

  name: str
  phase: str
  context: int
  batch: int = 1
  preset: str = 'glm52'

  @property
  def config(self) -> ModelConfig:
    """The model."""
    return PRESETS[self.preset]

  @property
  def new(self) -> int:
    """Tokens that the step computes, of each sequence."""
    return 1 if self.phase == 'decode' else self.context

  @property
  def positions(self) -> np.ndarray:
    """[batch * new] int32 position of each row."""
    last = np.arange(self.context - self.new, self.context, dtype=np.int32)
    return np.tile(last, self.batch)

  @property
  def shape(self) -> str:
    """In words."""
    rows = self.batch * self.new
    return f'{rows} rows of {self.batch} x {self.context} tokens'


def _cases() -> dict[str, LayerCase]:
  # In the order of running: those with a goal come early.
  decode = lambda batch: [
    LayerCase(f'decode_{size}_b{batch}', 'decode', context, batch)
    for size, context in _SIZES.items()
  ]
  cases = decode(1)
  cases += [LayerCase(f'prefill_{n}k', 'prefill', 1024 * n) for n in (4, 8, 16)]
  cases += decode(8)
  # More keys than the 64 that are selected, of 32 index heads.
  cases += [
    LayerCase('tiny_decode_b1', 'decode', 320, 1, TINY),
    LayerCase('tiny_decode_b2', 'decode', 320, 2, TINY),
    LayerCase('tiny_prefill', 'prefill', 192, 1, TINY),
  ]
  return {case.name: case for case in cases}


CASES = _cases()
# Where both frameworks' outputs are compared, by preset and phase.
PARITY = {
  ('glm52', 'decode'): CASES['decode_8k_b1'],
  ('glm52', 'prefill'): CASES['prefill_4k'],
  (TINY, 'decode'): CASES['tiny_decode_b2'],
  (TINY, 'prefill'): CASES['tiny_prefill'],
}


def forms(case: LayerCase) -> tuple[str, ...]:
  """PyTorch's systems that a case has; a prefill fills no StaticCache."""
  return TORCH if case.phase == 'decode' else TORCH[:2]


def layers_of(config: ModelConfig) -> dict[str, int]:
  """Layers of each kind in the whole model: 21 full and 57 shared."""
  full = config.indexer_types.count(FULL)
  return dict(full=full, shared=config.num_layers - full)


def weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """Random float32 weights of a full layer, by published name.

  A shared layer has the same ones without the indexer's. Kernels are
  [out, in] with the model's standard deviation.
  """
  c, i = config.mla, config.indexer
  norms = {
    'input_layernorm.weight': config.hidden_size,
    'self_attn.q_a_layernorm.weight': c.q_lora_rank,
    'self_attn.kv_a_layernorm.weight': c.kv_lora_rank,
    'self_attn.indexer.k_norm.weight': i.head_dim,
  }
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
  found = {
    name: config.initializer_range * normal(*shape)
    for name, shape in _kernels(config).items()
  }
  found |= {name: 1 + 0.1 * normal(width) for name, width in norms.items()}
  found['self_attn.indexer.k_norm.bias'] = 0.1 * normal(i.head_dim)
  return {k: v.astype(np.float32) for k, v in found.items()}


def hidden(case: LayerCase, seed: int = 1) -> np.ndarray:
  """[batch, new, D] float32 input of the layer."""
  shape = (case.batch, case.new, case.config.hidden_size)
  return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def cached(case: LayerCase, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
  """What the cache holds before the step.

  Args:
    case: the case.
    seed: of the numbers.

  Returns:
    latents [batch, n, R + P], normed latents and then rotary keys, and index
    keys [batch, n, H]; float32, n = context - new.
  """
  c, n = case.config, case.context - case.new
  rng = np.random.default_rng(seed)
  normal = lambda width: rng.standard_normal(
    (case.batch, n, width), dtype=np.float32
  )
  return normal(c.mla.row_dim), normal(c.indexer.head_dim)


def selection(case: LayerCase, seed: int = 3) -> np.ndarray:
  """[rows, k] int32 visible positions for a shared layer, then -1.

  One position in each of k equal parts of what a row sees, ascending; all of
  them where that is no more than k.
  """
  k = case.config.indexer.topk
  visible = case.positions[:, None].astype(np.int64) + 1
  edges = np.arange(k + 1)[None] * visible // k
  width = np.maximum(edges[:, 1:] - edges[:, :-1], 1)
  rng = np.random.default_rng(seed)
  drawn = edges[:, :-1] + (rng.random(width.shape) * width).astype(np.int64)
  first = np.broadcast_to(np.arange(k), drawn.shape)
  few = np.where(first < visible, first, -1)
  return np.where(visible > k, drawn, few).astype(np.int32)


def contract(indices: np.ndarray, case: LayerCase) -> np.ndarray:
  """PyTorch's indices [rows, n] as ours: [rows, k] ascending, then -1."""
  k, last = case.config.indexer.topk, np.iinfo(np.int32).max
  absent = (indices < 0) | (indices > case.positions[:, None])
  kept = np.sort(np.where(absent, last, indices), axis=1).astype(np.int32)
  kept = np.where(kept == last, -1, kept)
  more = ((0, 0), (0, k - kept.shape[1]))
  return np.pad(kept, more, constant_values=-1)


def work(case: LayerCase, kind: str) -> tuple[float, float]:
  """The least FLOPs and bytes of a layer of one kind.

  Weights and what is cached are read once, rows of one sequence share them;
  a row multiplies the keys that it sees or selects.
  """
  c, i = case.config.mla, case.config.indexer
  size = 4 if case.config.dtype == 'float32' else 2
  rows, visible = case.batch * case.new, case.positions.astype(np.int64) + 1
  matrices = sum(
    math.prod(shape)
    for name, shape in _kernels(case.config).items()
    if kind == 'full' or '.indexer.' not in name
  )
  pairs = int(np.minimum(visible, i.topk).sum())
  flops = 2.0 * rows * matrices
  flops += 2.0 * pairs * c.num_heads * (c.row_dim + c.kv_lora_rank)
  reads = min(pairs, case.batch * case.context) * c.row_dim
  if kind == 'full':
    flops += 2.0 * int(visible.sum()) * i.num_heads * i.head_dim
    reads += case.batch * case.context * i.head_dim
  moved = matrices + reads + 2 * rows * case.config.hidden_size
  return flops, float(size * moved)


def _kernels(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """[out, in] of every matrix of a full layer, by published name."""
  c, i, D = config.mla, config.indexer, config.hidden_size
  up = c.qk_nope_head_dim + c.v_head_dim
  qk = c.qk_nope_head_dim + c.qk_rope_head_dim
  return {
    'self_attn.q_a_proj.weight': (c.q_lora_rank, D),
    'self_attn.q_b_proj.weight': (c.num_heads * qk, c.q_lora_rank),
    'self_attn.kv_a_proj_with_mqa.weight': (c.row_dim, D),
    'self_attn.kv_b_proj.weight': (c.num_heads * up, c.kv_lora_rank),
    'self_attn.o_proj.weight': (D, c.num_heads * c.v_head_dim),
    'self_attn.indexer.wq_b.weight': (i.num_heads * i.head_dim, c.q_lora_rank),
    'self_attn.indexer.wk.weight': (i.head_dim, D),
    'self_attn.indexer.weights_proj.weight': (i.num_heads, D),
  }
