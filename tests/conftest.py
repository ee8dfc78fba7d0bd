"""Every test runs on CPU with eight devices and 32-bit numbers.

The environment is set before anything imports jax. `JAX_PLATFORMS` given
from outside wins, so the same tests run on an accelerator.
"""

import os
import pathlib

import pytest

_DEVICES = '--xla_force_host_platform_device_count'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_ENABLE_X64'] = '0'
_flags = os.environ.get('XLA_FLAGS', '')
if _DEVICES not in _flags:
  os.environ['XLA_FLAGS'] = f'{_flags} {_DEVICES}=8'.strip()


@pytest.fixture(autouse=True, scope='module')
def bounded_memory_maps():
  """Lets go of compiled programs when a process holds many.

  Each holds memory maps, of which Linux grants a process 65,530 by default;
  XLA's compiler crashes at the next one.
  """
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
    import jax

    jax.clear_caches()
