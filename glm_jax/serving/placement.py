"""Where an engine's arrays live beside the pools of its cache."""

from __future__ import annotations

import jax
import numpy as np


def host_sharding(array: jax.Array):
  """The sharding of a copy in pinned host memory; None without such."""
  device, *others = array.sharding.device_set
  if others:
    return None
  kinds = {memory.kind for memory in device.addressable_memories()}
  if 'pinned_host' not in kinds:
    return None
  return jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')


def beside(sharding):
  """Where small arrays live beside a pool: on all of its devices."""
  if isinstance(sharding, jax.sharding.NamedSharding):
    spec = jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(sharding.mesh, spec)
  return sharding


def put(tree, sharding):
  """Arrays that every process has, on all devices of a sharding."""
  if sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)

  def place(a):
    # `device_put` would compare the values of all processes, and wait.
    a = np.asarray(a)
    return jax.make_array_from_callback(a.shape, sharding, lambda at: a[at])

  return jax.tree.map(place, tree)
