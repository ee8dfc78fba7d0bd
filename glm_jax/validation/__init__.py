"""Validation of this repo's model against PyTorch, layer by layer.

    both in one process            validate(path)
    a reference from elsewhere     validate(path, framework='torch', record=R)
                                   validate(path, against=R)
    single layers of a big model   validate(path, layers=(0, 6, 77))

Importing this package, or its PyTorch side, imports no jax.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from glm_jax.config import ModelConfig
from glm_jax.published_config import config_from_published
from glm_jax.validation.record import Record, Writer
from glm_jax.validation.result import Result
from glm_jax.validation.run import Run
from glm_jax.validation.walk import Side

FRAMEWORKS = ('torch', 'jax')
_MAX_TOKENS = 4096  # of the default prompt


def validate(
  path: str | os.PathLike,
  tokens: Sequence[int] | None = None,
  *,
  dtype: str = 'float32',
  layers: Sequence[int] | None = None,
  record: str | os.PathLike | None = None,
  against: str | os.PathLike | None = None,
  framework: str | None = None,
  seed: int = 0,
  torch_device: str = 'cpu',
  log: Callable[[str], None] | None = None,
) -> Result:
  """Compares this repo's model with transformers', or records one of them.

  Args:
    path: checkpoint directory in the published format.
    tokens: ids of one sequence; None takes the record's, or seeded random
      ids that are longer than `index_topk`.
    dtype: of weights and arithmetic: 'float32', 'bfloat16', or 'auto' (the
      config's). In bfloat16 each layer is given the reference's input.
    layers: trunk layers to compare, each on the reference's input; None
      compares all of them, carrying on each side's own hidden state.
    record: directory to write the reference to (or, with `framework` alone,
      that framework's run).
    against: recorded reference to compare with.
    framework: 'torch' or 'jax': run this one only. None runs both, or, with
      `against`, the one that the record is not of.
    seed: of the default tokens.
    torch_device: where PyTorch computes, 'cpu' or 'cuda'. JAX computes where
      it always does.
    log: takes lines about progress; None writes to stderr.

  Returns:
    The verdict.

  Raises:
    ValueError: arguments, record and checkpoint do not fit together.
    ImportError: PyTorch is needed and not installed.
  """
  log = log or (lambda line: print(line, file=sys.stderr, flush=True))
  dtype = _resolve_dtype(dtype, path)
  if framework not in (None, *FRAMEWORKS):
    raise ValueError(f'{framework=} must be one of {FRAMEWORKS}')
  if framework and not (record or against):
    raise ValueError(
      f'framework={framework!r} alone compares nothing: add record=, '
      'against=, or leave framework out'
    )
  reference = None if against is None else Record(against)
  if framework is None and reference is not None:
    framework = 'torch' if reference.meta.framework == 'jax' else 'jax'
  names = (framework,) if framework else FRAMEWORKS
  sides = [_open(name, path, dtype, torch_device) for name in names]
  for note in itertools.chain(*(side.notes for side in sides)):
    log(note)
  config = sides[0].config
  _check_layers(layers, config)
  if reference is not None:
    reference.check(config, tokens, dtype, layers)
    tokens = reference.meta.tokens if tokens is None else tokens
  if tokens is None:
    tokens = default_tokens(config, seed, log)
  tokens = _check_tokens(tokens, config)
  run = Run(sides, tokens, dtype, layers, reference, log)
  with contextlib.ExitStack() as stack:
    writer = None
    if record is not None:
      writer = stack.enter_context(Writer(record))
    return run(writer)


def default_tokens(
  config: ModelConfig, seed: int, log: Callable[[str], None]
) -> np.ndarray:
  """Random ids, a quarter (at least 40) more than `index_topk` if allowed."""
  topk = config.indexer.topk
  wanted = topk + max(topk // 4, 40)
  count = min(wanted, _MAX_TOKENS, config.max_position_embeddings)
  rng = np.random.default_rng(seed)
  log(
    f'tokens: {count} random ids (seed {seed}), index_topk {topk}'
    + ('' if count > topk else ': nothing is pruned, selection is untested')
  )
  return rng.integers(0, config.vocab_size, count)


def _resolve_dtype(dtype: str, path) -> str:
  if dtype == 'auto':
    raw = (epath.Path(path) / 'config.json').read_text()
    return config_from_published(json.loads(raw)).dtype
  resolved = {'f32': 'float32', 'bf16': 'bfloat16'}.get(dtype, dtype)
  if resolved not in ('float32', 'bfloat16'):
    raise ValueError(f"{dtype=} must be 'float32', 'bfloat16' or 'auto'")
  return resolved


def _open(framework: str, path, dtype: str, torch_device: str) -> Side:
  if framework == 'jax':
    from glm_jax.validation.jax_side import JaxSide

    return JaxSide(path, dtype)
  try:
    from glm_jax.validation.torch_side import TorchSide
  except ImportError as error:
    raise ImportError(
      f'the PyTorch side needs {error.name}: pip install "glm-jax[validate]" '
      "(or pip install 'torch>=2.6' 'transformers>=5.24'), or compare with a "
      'recorded reference (--against)',
      name=error.name,
    ) from error
  return TorchSide(path, dtype, device=torch_device)


def _check_layers(layers: Sequence[int] | None, config: ModelConfig) -> None:
  if layers is None:
    return
  bad = [i for i in layers if not 0 <= i < config.num_layers]
  if bad or not layers:
    raise ValueError(
      f'layers={list(layers)} must be some of 0 to {config.num_layers - 1}'
    )


def _check_tokens(tokens: Sequence[int], config: ModelConfig) -> np.ndarray:
  tokens = np.asarray(tokens)
  whole = tokens.ndim == 1 and tokens.size > 0 and tokens.dtype.kind in 'iu'
  if not whole:
    raise ValueError('tokens must be one non-empty list of whole numbers')
  if tokens.min() < 0 or tokens.max() >= config.vocab_size:
    raise ValueError(
      f'tokens hold ids from {tokens.min()} to {tokens.max()}: the '
      f'vocabulary has {config.vocab_size}'
    )
  return tokens.astype(np.int64)
