"""All-gathers in two kernels: one starts the copies, another waits for them.

On v5p XLA runs an all-gather and compute one after the other, whatever its
options; on v6e and tpu7x it moves all-gathers to the SparseCores, which a
prefill step keeps busy with gathers, scatters and relayouts, and leaves little
of a layer's compute beside them (results/misses.md). Here a kernel starts the
copies of this rank's rows to all others and returns at once; a second one
waits until all rows are there and its own are sent. Between the two the
TensorCore is free. What the compute in between reads (`through`) comes out of
the first kernel, and what it makes goes into the second, both in place: so no
scheduler can move the compute out from between them.

The rows are read where they lie in the pool. The pool passes through both
kernels too, so that its memory outlives the copies; rows of other layers may
be written meanwhile. A rank starts only when all others have come as far:
from then on their slots may be written. Nobody is two gathers ahead, since
nobody ends one before all others have started it, so one barrier serves all
gathers that wait for each other.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_ANY = pl.BlockSpec(memory_space=pl.ANY)
_SEM = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
# Rows that the widest tile of all dtypes holds (1,024 scales).
ROWS = 1024


class Ring(NamedTuple):
  """The ranks that gather.

  Attributes:
    axes: mesh axes over which rows are split.
    sizes: of these axes.
    others: mesh axes along which a rank stays where it is.
    barrier: id of its barrier; gathers that do not wait for each other need
      different ones.
  """

  axes: tuple[str, ...]
  sizes: tuple[int, ...]
  others: tuple[str, ...]
  barrier: int

  @property
  def ranks(self) -> int:
    """Ranks of the ring."""
    return math.prod(self.sizes)

  def device(self, rank) -> dict[str, jax.Array]:
    """Mesh coordinates of a rank of the ring."""
    found = {axis: lax.axis_index(axis) for axis in self.others}
    for axis, size in zip(reversed(self.axes), reversed(self.sizes)):
      found[axis], rank = rank % size, rank // size
    return found


def start(
  pools: tuple[jax.Array, ...],
  slots: jax.Array,
  rows: int,
  through: jax.Array,
  ring: Ring,
):
  """Starts to gather rows; runs on each rank.

  Args:
    pools: [n, ...] arrays of this rank.
    slots: [pools] int32: the rows of a pool are slot * rows and those after.
    rows: how many, a multiple of `ROWS`.
    through: an array that the compute in between reads.
    ring: who gathers.

  Returns:
    pools and through, to be used from here on; the gathered arrays
    [ranks * rows, ...], not there yet; and two semaphores, for `wait`.
  """
  whole = [_whole(p, rows, ring) for p in pools]
  received = sum(math.prod(w.shape) * w.dtype.itemsize for w in whole)
  k = len(pools)
  kept = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*pools, through)]
  out = pl.pallas_call(
    functools.partial(_start_kernel, k=k, rows=rows, ring=ring),
    in_specs=[_SMEM, *[_ANY] * (k + 1)],
    out_specs=[*[_ANY] * (2 * k + 1), _SEM, _SEM],
    out_shape=[*kept, *whole, *[pltpu.SemaphoreType.DMA(())] * 2],
    input_output_aliases={i + 1: i for i in range(k + 1)},
    cost_estimate=pl.CostEstimate(
      flops=0,
      transcendentals=0,
      bytes_accessed=received // ring.ranks,
      remote_bytes_transferred=received // ring.ranks * (ring.ranks - 1),
    ),
    compiler_params=pltpu.CompilerParams(
      collective_id=ring.barrier, has_side_effects=True
    ),
    name='gather_start',
  )(slots, *pools, through)
  *arrays, sent, arrived = out
  return (
    tuple(arrays[:k]), arrays[k], tuple(arrays[k + 1 :]), (sent, arrived)
  )  # fmt: skip


def wait(
  pools: tuple[jax.Array, ...],
  gathered: tuple[jax.Array, ...],
  semaphores,
  rows: int,
  through: jax.Array,
  ring: Ring,
):
  """Waits for what `start` began; runs on each rank.

  Args:
    pools: as they are now.
    gathered: of `start`.
    semaphores: of `start`.
    rows: as for `start`.
    through: what the compute in between made.
    ring: as for `start`.

  Returns:
    pools, the gathered arrays, and through.
  """
  k = len(pools)
  arrays = (*pools, *gathered, through)
  out = pl.pallas_call(
    functools.partial(_wait_kernel, k=k, rows=rows, ring=ring),
    in_specs=[*[_ANY] * (2 * k + 1), _SEM, _SEM],
    out_specs=[_ANY] * (2 * k + 1),
    out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays],
    input_output_aliases={i: i for i in range(2 * k + 1)},
    cost_estimate=pl.CostEstimate(
      flops=0,
      transcendentals=0,
      bytes_accessed=sum(math.prod(g.shape) * g.dtype.itemsize
                         for g in gathered),
    ),
    compiler_params=pltpu.CompilerParams(has_side_effects=True),
    name='gather_wait',
  )(*arrays, *semaphores)  # fmt: skip
  return tuple(out[:k]), tuple(out[k : 2 * k]), out[2 * k]


def gather(
  pools: tuple[jax.Array, ...],
  slots: jax.Array,
  rows: int,
  ring: Ring,
  interpret=False,
):
  """Starts and waits in one kernel: for a gather that nothing hides.

  Args:
    pools: as for `start`.
    slots: as for `start`.
    rows: as for `start`.
    ring: as for `start`.
    interpret: to simulate it on a CPU.

  Returns:
    pools, to be used from here on, and the gathered arrays.
  """
  whole = [_whole(p, rows, ring) for p in pools]
  received = sum(math.prod(w.shape) * w.dtype.itemsize for w in whole)
  k = len(pools)
  kept = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pools]
  out = pl.pallas_call(
    functools.partial(_gather_kernel, k=k, rows=rows, ring=ring),
    in_specs=[_SMEM, *[_ANY] * k],
    out_specs=[_ANY] * (2 * k),
    out_shape=[*kept, *whole],
    input_output_aliases={i + 1: i for i in range(k)},
    scratch_shapes=[pltpu.SemaphoreType.DMA(())] * 2,
    cost_estimate=pl.CostEstimate(
      flops=0,
      transcendentals=0,
      bytes_accessed=received,
      remote_bytes_transferred=received // ring.ranks * (ring.ranks - 1),
    ),
    compiler_params=pltpu.CompilerParams(
      collective_id=ring.barrier, has_side_effects=True
    ),
    interpret=interpret,
    name='gather_rows',
  )(slots, *pools)
  return tuple(out[:k]), tuple(out[k:])


def _whole(pool, rows: int, ring: Ring) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((ring.ranks * rows, *pool.shape[1:]), pool.dtype)


def _start_kernel(slots, *refs, k, rows, ring):
  pools, whole = refs[:k], refs[2 * k + 2 : 3 * k + 2]
  _send(slots, pools, whole, *refs[3 * k + 2 :], rows, ring)


def _wait_kernel(*refs, k, rows, ring):
  pools, whole, semaphores = refs[:k], refs[k : 2 * k], refs[2 * k + 1 :][:2]
  _receive(pools, whole, *semaphores, rows, ring)


def _gather_kernel(slots, *refs, k, rows, ring):
  pools, whole, semaphores = refs[:k], refs[2 * k : 3 * k], refs[3 * k :]
  _send(slots, pools, whole, *semaphores, rows, ring)
  _receive(pools, whole, *semaphores, rows, ring)


def _rank(ring: Ring):
  return lax.axis_index(ring.axes)


def _send(slots, pools, whole, sent, arrived, rows, ring: Ring):
  """Meets all others, then sends them this rank's rows, and copies its own."""
  me, n = _rank(ring), ring.ranks
  ready = pltpu.get_barrier_semaphore()

  def meet(d, _):
    pl.semaphore_signal(
      ready,
      1,
      device_id=ring.device((me + d) % n),
      device_id_type=pl.DeviceIdType.MESH,
    )

  lax.fori_loop(1, n, meet, None)
  pl.semaphore_wait(ready, n - 1)
  for i, (pool, out) in enumerate(zip(pools, whole)):
    source = pool.at[pl.ds(pl.multiple_of(slots[i] * rows, rows), rows)]
    target = out.at[pl.ds(pl.multiple_of(me * rows, rows), rows)]

    def send(d, _, source=source, target=target):
      _copy(source, target, sent, arrived, (me + d) % n, ring).start()

    pltpu.make_async_copy(source, target, arrived).start()
    lax.fori_loop(1, n, send, None)


def _receive(pools, whole, sent, arrived, rows, ring: Ring):
  """Waits for all rows; semaphores count bytes, whoever they come from."""
  me, n = _rank(ring), ring.ranks
  for pool, out in zip(pools, whole):
    source, target = pool.at[pl.ds(0, rows)], out.at[pl.ds(0, rows)]

    def receive(d, _, source=source, target=target):
      copy = _copy(source, target, sent, arrived, (me + d) % n, ring)
      copy.wait_send()
      copy.wait_recv()

    pltpu.make_async_copy(source, target, arrived).wait()
    lax.fori_loop(1, n, receive, None)


def _copy(source, target, sent, arrived, rank, ring: Ring):
  return pltpu.make_async_remote_copy(
    src_ref=source,
    dst_ref=target,
    send_sem=sent,
    recv_sem=arrived,
    device_id=ring.device(rank),
    device_id_type=pl.DeviceIdType.MESH,
  )
