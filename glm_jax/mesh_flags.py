"""Flags of launchers that run on several devices or hosts.

Importing this defines them; `sharding.launching` acts on them.
"""

from __future__ import annotations

from absl import flags

MESH = flags.DEFINE_string(
  'mesh',
  None,
  "Devices by axis, such as 'context=8' or 'data=2,context=4'; absent: one "
  'device, or all devices on context with several processes.',
)
CACHE_PLAN = flags.DEFINE_enum(
  'cache_plan',
  'token_split',
  ['token_split', 'layer_split', 'replicated'],
  'How the cache is split over the mesh.',
)
CACHE_SLOTS = flags.DEFINE_integer(
  'cache_slots',
  2,
  'Layers on every device at once where whole layers are fetched: 2 fetches '
  'ahead, 1 saves memory.',
)
COORDINATOR = flags.DEFINE_string(
  'coordinator_address',
  None,
  "HOST:PORT of process 0, or 'auto' on TPU pods; absent: one process.",
)
NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, "Processes of all hosts; 'auto' finds them."
)
PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, "This process, from 0; 'auto' finds it."
)
HEARTBEAT = flags.DEFINE_float(
  'heartbeat_seconds', 30.0, 'A process silent for so long ends all others.'
)
