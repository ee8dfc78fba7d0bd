"""Weights of one transformers decoder layer, read from a checkpoint.

Reads with the safetensors library itself, not with this repo's reader, so
that the oracle shares no code with what it judges. bf16, f32 and
block-scaled FP8 tensors; experts one by one or fused.
"""

from __future__ import annotations

import json
import os
import pathlib

import torch
from safetensors import safe_open

_SCALE = '_scale_inv'


class TorchWeights:
  """Tensors of a local checkpoint directory by published name."""

  def __init__(
    self, path: str | os.PathLike, block: tuple[int, int] | None = None
  ):
    """Finds the tensors; `block` is the FP8 scale block, (128, 128) if None.

    Raises:
      ValueError: no safetensors files here.
    """
    self.path = pathlib.Path(path)
    self.block = block or (128, 128)
    self._files = _files(self.path)

  def __contains__(self, name: str) -> bool:
    return name in self._files

  def copy_into(self, target: torch.Tensor, name: str):
    """Copies a tensor into `target`, dequantised and cast.

    Args:
      target: receives the values.
      name: published name.

    Raises:
      ValueError: the tensor is missing or has another shape.
    """
    values = self._read(name)
    if values.element_size() == 1:
      scales = self._read(name + _SCALE).float()
      rows = scales.repeat_interleave(self.block[0], dim=-2)
      full = rows.repeat_interleave(self.block[1], dim=-1)
      F, D = values.shape[-2:]
      values = values.float() * full[..., :F, :D]
    if values.shape != target.shape:
      raise ValueError(
        f'{name} has shape {tuple(values.shape)}, the config wants '
        f'{tuple(target.shape)}'
      )
    with torch.no_grad():
      target.copy_(values)

  def fill(self, module: torch.nn.Module, prefix: str):
    """Fills every parameter and persistent buffer of a module.

    Args:
      module: allocated, contents undefined.
      prefix: published prefix of its tensors, with the trailing dot.
    """
    for name, target in module.state_dict(keep_vars=True).items():
      published = prefix + name
      if 'experts.gate_up_proj' in name or 'experts.down_proj' in name:
        if published not in self:
          self._fill_experts(target, published)
          continue
      self.copy_into(target.data, published)

  def _fill_experts(self, target: torch.Tensor, published: str):
    """Fills [E, ...] from tensors of single experts."""
    stem, _, part = published.rpartition('.')
    for e, expert in enumerate(target.data):
      if part == 'down_proj':
        self.copy_into(expert, f'{stem}.{e}.down_proj.weight')
        continue
      gate, up = expert.chunk(2)
      self.copy_into(gate, f'{stem}.{e}.gate_proj.weight')
      self.copy_into(up, f'{stem}.{e}.up_proj.weight')

  def _read(self, name: str) -> torch.Tensor:
    if name not in self._files:
      raise ValueError(f'{self.path} has no tensor {name}')
    with safe_open(self._files[name], 'pt') as file:
      return file.get_tensor(name)


def _files(path: pathlib.Path) -> dict[str, pathlib.Path]:
  """The file of every tensor."""
  index = path / 'model.safetensors.index.json'
  if index.exists():
    names = json.loads(index.read_text())['weight_map']
    return {name: path / file for name, file in names.items()}
  found = {}
  for file in sorted(path.glob('*.safetensors')):
    with safe_open(file, 'pt') as opened:
      found |= dict.fromkeys(opened.keys(), file)
  if not found:
    raise ValueError(
      f'{path} holds no safetensors: the PyTorch side reads a local '
      'checkpoint directory'
    )
  return found
