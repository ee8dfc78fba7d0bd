"""The MTP layer written out in PyTorch: the drafter's oracle.

`transformers` drops checkpoint layer N, so this is its specification in
plain code (spec/model.md section 4.1), on transformers' own decoder layer:
one sequence, every step from scratch, no cache.
"""

from __future__ import annotations

import copy

import torch
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from glm_jax.config import ModelConfig
from glm_jax.validation.torch_weights import TorchWeights


class TorchDrafter:
  """Layer N of a checkpoint, in float32."""

  def __init__(self, weights: TorchWeights, hf_config, config: ModelConfig):
    """Loads the layer.

    Args:
      weights: the checkpoint's tensors.
      hf_config: transformers' reading of its config.
      config: ours.
    """
    self._weights, self._c = weights, config
    hf = copy.deepcopy(hf_config)
    hf.indexer_types = [*hf.indexer_types, 'full']
    hf.mlp_layer_types = [*hf.mlp_layer_types, 'sparse']
    self._prefix = f'model.layers.{config.num_layers}.'
    with torch.device('meta'):
      layer = glm.GlmMoeDsaDecoderLayer(hf, config.num_layers)
    self._layer = (
      layer.float().eval().to_empty(device=torch.get_default_device())
    )
    weights.fill(self._layer, self._prefix)
    attention = self._layer.self_attn
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
      norm.variance_epsilon = config.mla.latent_norm_eps
    self._rotary = glm.GlmMoeDsaRotaryEmbedding(hf)
    V, D = config.vocab_size, config.hidden_size
    self._embed = self._read('model.embed_tokens.weight', V, D)
    head = f'{self._prefix}shared_head.head.weight'
    if head not in weights:
      tied = config.tie_word_embeddings
      head = 'model.embed_tokens.weight' if tied else 'lm_head.weight'
    self._head = self._read(head, V, D)
    own = lambda name, *shape: self._read(self._prefix + name, *shape)
    self._enorm, self._hnorm = own('enorm.weight', D), own('hnorm.weight', D)
    self._norm = own('shared_head.norm.weight', D)
    self._eh_proj = own('eh_proj.weight', D, 2 * D)

  @torch.no_grad()
  def __call__(
    self,
    tokens: list[int],
    hidden: torch.Tensor,
    drafted: list[int],
    *,
    share: bool = True,
    advance: bool = True,
  ) -> torch.Tensor:
    """Draft logits, with the drafted tokens given.

    Args:
      tokens: verified tokens t_0 .. t_n; the trunk has seen all but t_n.
      hidden: [n, D] the trunk's post-norm hidden states.
      drafted: tokens d_1 .. d_{K-1} that the later steps embed.
      share: later steps reuse step 0's index and rows.
      advance: each later step's query rotates one position on.

    Returns:
      [K, V] float32.
    """
    rows = [self._join(t, h) for t, h in zip(tokens[1:], hidden)]
    rows = torch.stack(rows)
    last = len(rows) - 1
    positions = list(range(last + 1))
    u, topk = self._run(rows, positions)
    # What goes on is the state after the norm.
    g = _rms(u[last], self._norm, self._c.rms_norm_eps)
    selected = topk[last][topk[last] <= last].long()
    out, grown, grown_positions = [g @ self._head.T], rows, positions
    for j, token in enumerate(drafted, 1):
      z = self._join(token, g)
      at = last + j if advance else last
      if share:
        u = self._query(z, at, rows, positions, selected)
      else:
        grown = torch.cat([grown, z[None]])
        grown_positions = [*grown_positions, at]
        u = self._run(grown, grown_positions)[0][-1]
      g = _rms(u, self._norm, self._c.rms_norm_eps)
      out.append(g @ self._head.T)
    return torch.stack(out)

  def _read(self, name: str, *shape: int) -> torch.Tensor:
    target = torch.empty(shape)
    self._weights.copy_into(target, name)
    return target

  def _join(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
    """eh_proj of [enorm(embedding) ; hnorm(hidden)], the embedding first."""
    eps = self._c.rms_norm_eps
    halves = [
      _rms(self._embed[token], self._enorm, eps),
      _rms(hidden, self._hnorm, eps),
    ]
    return torch.cat(halves) @ self._eh_proj.T

  def _run(self, rows: torch.Tensor, positions: list[int]):
    """The decoder layer over [S, D] rows: output [S, D], top-k [S, k]."""
    S = len(rows)
    mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)
    out, topk = self._layer(
      rows[None],
      attention_mask=mask[None, None],
      position_embeddings=self._rope(positions),
    )
    return out[0], topk[0]

  def _rope(self, positions: list[int]):
    return self._rotary(torch.zeros(1), torch.tensor([positions]))

  def _query(self, z, position, rows, positions, selected) -> torch.Tensor:
    """One query z [D] over the first step's rows, `selected` ones alone."""
    layer, a = self._layer, self._layer.self_attn
    x = layer.input_layernorm(z[None, None])
    q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x)))
    q = q.view(1, 1, a.num_heads, -1).transpose(1, 2)
    cut = a.qk_nope_head_dim
    kv = a.kv_a_proj_with_mqa(layer.input_layernorm(rows[None]))
    latent = a.kv_a_layernorm(kv[..., : a.kv_lora_rank])
    key = kv[..., a.kv_lora_rank :][:, None]
    rotate = glm.apply_rotary_pos_emb_interleave
    turned, _ = rotate(q[..., cut:], q[..., cut:], *self._rope([position]))
    key, _ = rotate(key, key, *self._rope(positions))
    k, v = a.expand_kv(latent[:, None], key)
    q = torch.cat([q[..., :cut], turned], dim=-1)
    logits = q @ k.transpose(2, 3) * a.scaling
    allowed = torch.zeros(len(rows), dtype=torch.bool)
    allowed[selected] = True
    logits = logits.masked_fill(~allowed, -torch.inf)
    out = (logits.softmax(-1) @ v).transpose(1, 2).reshape(1, 1, -1)
    h = z[None, None] + a.o_proj(out)
    return (h + layer.mlp(layer.post_attention_layernorm(h)))[0, 0]


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
  return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
