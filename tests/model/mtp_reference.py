"""The MTP layer written out in PyTorch: the drafter's oracle.

transformers drops checkpoint layer N, so this is its specification in plain
code (spec/model.md section 4.1), on transformers' own decoder layer. One
sequence, float32, every step from scratch.
"""

import dataclasses

import safetensors.torch
import torch
import transformers
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf


@dataclasses.dataclass
class Reference:
  """Trunk and drafter of a checkpoint written by `random_checkpoint`."""

  trunk: transformers.GlmMoeDsaForCausalLM
  layer: hf.GlmMoeDsaDecoderLayer
  weights: dict[str, torch.Tensor]
  config: transformers.GlmMoeDsaConfig

  @classmethod
  def load(cls, directory):
    config = transformers.GlmMoeDsaConfig.from_pretrained(directory)
    config._attn_implementation = 'eager'
    trunk = transformers.GlmMoeDsaForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='eager'
    )
    n = config.num_hidden_layers
    config.indexer_types = [*config.indexer_types, 'full']
    config.mlp_layer_types = [*config.mlp_layer_types, 'sparse']
    layer = hf.GlmMoeDsaDecoderLayer(config, n)
    tensors = safetensors.torch.load_file(f'{directory}/model.safetensors')
    prefix = f'model.layers.{n}.'
    weights = {
      k.removeprefix(prefix): v
      for k, v in tensors.items()
      if k.startswith(prefix)
    }
    state = {
      k: v
      for k, v in weights.items()
      if k.startswith(('self_attn', 'input_', 'post_'))
      or (k.startswith('mlp') and '.experts.' not in k)
    }
    experts = range(config.n_routed_experts)
    part = lambda e, name: weights[f'mlp.experts.{e}.{name}_proj.weight']
    state['mlp.experts.gate_up_proj'] = torch.stack(
      [torch.cat([part(e, 'gate'), part(e, 'up')]) for e in experts]
    )
    state['mlp.experts.down_proj'] = torch.stack(
      [part(e, 'down') for e in experts]
    )
    layer.load_state_dict(state)
    for module in (*trunk.modules(), *layer.modules()):
      for name in ('q_a_layernorm', 'kv_a_layernorm'):
        if hasattr(module, name):
          getattr(module, name).variance_epsilon = config.rms_norm_eps
    return cls(trunk.eval(), layer.eval(), weights, config)

  @torch.no_grad()
  def trunk_hidden(self, tokens):
    """Post-norm hidden states [T, D] and logits [T, V]."""
    out = self.trunk.model(input_ids=torch.tensor([tokens]), use_cache=False)
    hidden = out.last_hidden_state[0]
    return hidden, self.trunk.lm_head(hidden)

  def join(self, token, hidden):
    """eh_proj of [enorm(embedding) ; hnorm(hidden)]."""
    embedding = self.trunk.model.embed_tokens(torch.tensor(token))
    halves = [
      self._norm(embedding, 'enorm.weight'),
      self._norm(hidden, 'hnorm.weight'),
    ]
    return torch.cat(halves, dim=-1) @ self.weights['eh_proj.weight'].T

  def _norm(self, x, name):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale * self.weights[name]

  def _run(self, z, positions):
    """The decoder layer over rows z [S, D]; output [S, D], top-k [S, k]."""
    S = len(z)
    mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)
    rope = self._rope(positions)
    out, topk = self.layer(
      z[None],
      attention_mask=mask[None, None],
      position_embeddings=rope,
    )
    return out[0], topk[0]

  def _rope(self, positions):
    positions = torch.tensor([list(positions)])
    return self.trunk.model.rotary_emb(torch.zeros(1), positions)

  def _frozen(self, z, position, rows, row_positions, selected):
    """One query z [D] over given rows [S, D], restricted to `selected`."""
    a = self.layer.self_attn
    x = self.layer.input_layernorm(z[None, None])
    q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x)))
    q = q.view(1, 1, a.num_heads, -1).transpose(1, 2)
    cut = a.qk_nope_head_dim
    q_nope, q_rope = q[..., :cut], q[..., cut:]
    kv = a.kv_a_proj_with_mqa(self.layer.input_layernorm(rows[None]))
    latent = a.kv_a_layernorm(kv[..., : a.kv_lora_rank])
    k_rope = kv[..., a.kv_lora_rank :][:, None]
    rotate = hf.apply_rotary_pos_emb_interleave
    q_rope, _ = rotate(q_rope, q_rope, *self._rope([position]))
    k_rope, _ = rotate(k_rope, k_rope, *self._rope(row_positions))
    k, v = a.expand_kv(latent[:, None], k_rope)
    logits = torch.cat([q_nope, q_rope], -1) @ k.transpose(2, 3) * a.scaling
    allowed = torch.zeros(len(rows), dtype=torch.bool)
    allowed[selected] = True
    logits = logits.masked_fill(~allowed, -torch.inf)
    out = (logits.softmax(-1) @ v).transpose(1, 2).reshape(1, 1, -1)
    h = z[None, None] + a.o_proj(out)
    return (h + self.layer.mlp(self.layer.post_attention_layernorm(h)))[0, 0]

  @torch.no_grad()
  def draft(self, tokens, drafts, *, share=True, advance=True):
    """Logits [K, V] of each draft step; drafted tokens are given.

    Args:
      tokens: verified tokens t_0 .. t_n; the trunk has seen all but t_n.
      drafts: drafted tokens d_1 .. d_{K-1} that later steps embed.
      share: later steps reuse step 0's index and rows.
      advance: each later step's query rotates one position on.
    """
    hidden, _ = self.trunk_hidden(tokens[:-1])
    rows = torch.stack([self.join(t, h) for t, h in zip(tokens[1:], hidden)])
    last = len(rows) - 1
    positions = list(range(last + 1))
    u, topk = self._run(rows, positions)
    g = self._norm(u[last], 'shared_head.norm.weight')
    selected = topk[last]
    selected = selected[selected <= last].long()
    out = [self._logits(g)]
    grown = rows
    for j, token in enumerate(drafts, 1):
      z = self.join(token, g)
      at = last + j if advance else last
      if share:
        u_j = self._frozen(z, at, rows, positions, selected)
      else:
        grown = torch.cat([grown, z[None]])
        positions = [*positions, at]
        u_j = self._run(grown, positions)[0][-1]
      g = self._norm(u_j, 'shared_head.norm.weight')
      out.append(self._logits(g))
    return torch.stack(out)

  def _logits(self, g):
    head = self.weights.get('shared_head.head.weight')
    return g @ (self.trunk.lm_head.weight if head is None else head).T
