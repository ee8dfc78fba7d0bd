"""Balance of experts without an auxiliary loss (DeepSeek-V3's rule).

After a step, an expert that got more rows than the mean has its correction
bias lowered by `rate`, one that got fewer has it raised. The bias takes part
in the choice of experts only (`glm_jax.moe`), so no gradient is involved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_load(
  experts: jax.Array, num_experts: int, mask: jax.Array | None = None
) -> jax.Array:
  """Rows that each expert got.

  Args:
    experts: [T, k] int32 experts of each row.
    num_experts: E.
    mask: [T] True for rows that count; None for all.

  Returns:
    [E] int32 counts; add those of a step's micro-batches.
  """
  if mask is not None:
    experts = jnp.where(mask[:, None], experts, num_experts)
  counts = jnp.zeros(num_experts, jnp.int32)
  return counts.at[experts.reshape(-1)].add(1, mode='drop')


def update_correction_bias(
  bias: jax.Array, load: jax.Array, rate: float
) -> jax.Array:
  """Moves each expert's bias one step towards the mean load.

  Args:
    bias: [E] float32.
    load: [E] rows of each expert in the step.
    rate: size of the step.

  Returns:
    [E] bias + rate * sign(mean load - load), cut from any graph.
  """
  load = load.astype(bias.dtype)
  moved = bias + rate * jnp.sign(jnp.mean(load) - load)
  return jax.lax.stop_gradient(moved.astype(bias.dtype))
