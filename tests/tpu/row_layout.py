"""Layouts of the latent rows, judged by the TPU compiler (nothing runs).

  python tests/tpu/row_layout.py --json=results/tpu_row_layout.json

The program is one group of four layers at decode, 8 query rows of 2048 slots:
each layer writes its own 8 rows, gathers and attends. Layouts:

  bf16_640  [M, 640] bf16, 576 used; 1280 bytes a row
  u8_640    [M, 640] bytes of a record, and scales; 656 bytes
  i32_384   [M, 384] words, feature j low and j + 288 high; 1536 bytes
  group     [M / 4, 1152] words: four layers' rows side by side, 1152 bytes a
            row. Gathered once before the group, the step's own rows attended
            apart and merged by lse, the record written once at the end
  quarters  the same record, each layer writing its own quarter: the trap

Temporaries and copies are of that program; cycles are of its attention kernel
alone, four times, by the compiler's model of the TensorCore. A gather on the
SparseCores has no estimate: its bytes (read and written) over the bandwidth
stand for it. kernel_us is max(cycles / clock, bytes / bandwidth).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from glm_jax.benchmarks.child import read_cycles  # noqa: E402
from glm_jax.benchmarks.compiled import CLOCKS, SLICES, compile_for  # noqa: E402
from pallas_kernels.topk_gather_attention import dense_kernel, tpu  # noqa: E402
from pallas_kernels.topk_gather_attention.dense_kernel import (  # noqa: E402
  matmul,
  readable,
  softmax,
)
from sharding.chips import CHIPS  # noqa: E402

LAYERS, T, N, K, R, P = 4, 8, 64, 2048, 512, 64
TOKENS = 1 << 21  # of one device's share, a layer
SCALE = 1 / 16
WORDS = 4 * (R + P) // 2
shape = jax.ShapeDtypeStruct


def attend_rows(q, rows, scales, slots):
  return tpu.topk_gather_attention(
    q, rows, scales, slots, scale=SCALE, latent_width=R
  )


def halves(words):
  """The low and the high bf16 of each word."""
  high = words & jnp.int32(-65536)
  cast = lambda w: lax.bitcast_convert_type(w, jnp.float32)
  return cast(words << 16).astype(jnp.bfloat16), cast(high).astype(jnp.bfloat16)


def words_kernel(q_ref, slots_ref, *refs):
  """Attention over words: q_ref [1, 2, N, W] for low and high halves."""
  *parts, out_ref, lse_ref = refs
  pairs = [halves(part[0]) for part in parts]
  logits, at = 0.0, 0
  for pair in pairs:
    width = pair[0].shape[1]
    for half, x in enumerate(pair):
      logits += matmul(q_ref[0, half, :, at : at + width], x, 1)
    at += width
  p, total, top = softmax(logits * SCALE, slots_ref[0] >= 0)
  p = p.astype(jnp.bfloat16)
  low, high = (matmul(p, x, 0) / total for x in pairs[0])
  out_ref[0, 0], out_ref[0, 1] = low.astype(p.dtype), high.astype(p.dtype)
  lse = jnp.broadcast_to(top + jnp.log(total), (N, 128))
  lse_ref[0] = lse.T[:1]


def attend_words(q, words, slots, blocks):
  """q [T, 2, N, W], words [T, K, all], blocks of (width, lane block)."""
  mine = lambda t: (t, 0, 0)
  in_specs = [
    pl.BlockSpec((1, *q.shape[1:]), lambda t: (t, 0, 0, 0)),
    pl.BlockSpec((1, 1, K), mine),
  ]
  for width, at in blocks:
    in_specs.append(pl.BlockSpec((1, K, width), lambda t, at=at: (t, 0, at)))
  width = blocks[0][0]
  return pl.pallas_call(
    words_kernel,
    grid=(T,),
    in_specs=in_specs,
    out_specs=[
      pl.BlockSpec((1, 2, N, width), lambda t: (t, 0, 0, 0)),
      pl.BlockSpec((1, 1, N), mine),
    ],
    out_shape=[
      shape((T, 2, N, width), jnp.bfloat16),
      shape((T, 1, N), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=56 << 20
    ),
    name='words_attention',
  )(q, slots[:, None], *[words] * len(blocks))


def pack(x, half, width):
  """bf16 [..., F] as words of features j and j + half, padded to `width`."""
  bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
  low, high = bits[..., :half], bits[..., half:]
  words = low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16
  words = lax.bitcast_convert_type(words, jnp.int32)
  return jnp.pad(words, [(0, 0)] * (x.ndim - 1) + [(0, width - half)])


def split(q, half, width):
  """Queries [T, 2, N, width] for the low and the high halves."""
  rest = ((0, 0), (0, 0), (0, width - half))
  return jnp.stack(
    [jnp.pad(q[..., :half], rest), jnp.pad(q[..., half:], rest)], 1
  )


def own(new, out):
  """A layer's own rows depend on the layer before it, as in the model."""
  return new + out[:, 0, :1].astype(new.dtype)


def padded_rows(pool, q, new, slots, at):
  """bf16_640 (and, with scales, u8_640)."""
  rows, scales = pool if isinstance(pool, tuple) else (pool, None)
  out, outs = jnp.zeros((T, N, R), jnp.bfloat16), []
  for layer in range(LAYERS):
    value = own(new[layer], out)
    if scales is not None:
      value = lax.bitcast_convert_type(
        value.astype(jnp.float8_e4m3fn), jnp.uint8
      )
      fresh = jnp.ones((T, scales.shape[1]), jnp.float32)
      scales = scales.at[at + layer * TOKENS].set(fresh, mode='drop')
    value = jnp.pad(value, ((0, 0), (0, rows.shape[1] - value.shape[1])))
    rows = rows.at[at + layer * TOKENS].set(value, mode='drop')
    ids = jnp.where(slots >= 0, slots + layer * TOKENS, -1)
    out, _ = attend_rows(q[layer], rows, scales, ids)
    outs.append(out)
  return (rows if scales is None else (rows, scales)), outs


def packed_rows(pool, q, new, slots, at):
  """i32_384."""
  half, width = (R + P) // 2, 384
  out, outs = jnp.zeros((T, N, R), jnp.bfloat16), []
  for layer in range(LAYERS):
    words = pack(own(new[layer], out), half, width)
    pool = pool.at[at + layer * TOKENS].set(words, mode='drop')
    ids = readable(jnp.where(slots >= 0, slots + layer * TOKENS, -1))
    gathered = jnp.take(pool, ids, axis=0, mode='clip')
    both, _ = attend_words(
      split(q[layer], half, width), gathered, slots, [(width, 0)]
    )
    out = jnp.concatenate([both[:, 0, :, :half], both[:, 1, :, :half]], -1)
    outs.append(out[..., :R])
  return pool, outs


def record_words(new):
  """A layer's latent words [T, 256] and rotary words [T, 32]."""
  return pack(new[:, :R], R // 2, R // 2), pack(new[:, R:], P // 2, P // 2)


def record_query(q, layer):
  """Latent words' queries, then the layer's 32 lanes of the rotary block."""
  rope = split(q[..., R:], P // 2, P // 2)
  before = layer * P // 2
  rope = jnp.pad(rope, ((0, 0),) * 3 + ((before, 128 - before - P // 2),))
  return jnp.concatenate([split(q[..., :R], R // 2, R // 2), rope], axis=-1)


def merge_own(q, new, out, lse):
  """Adds the step's own row to an attention, by lse."""
  logit = SCALE * jnp.einsum(
    'tnd,td->tn', q, new, preferred_element_type=jnp.float32
  )
  weight = jax.nn.sigmoid(logit - lse)[..., None]
  return ((1 - weight) * out + weight * new[:, None, :R]).astype(out.dtype)


def group_record(pool, q, new, slots, at, *, quarters=False):
  """group and quarters."""
  gathered = jnp.take(pool, readable(slots), axis=0, mode='clip')
  out, outs, latents, ropes = jnp.zeros((T, N, R), jnp.bfloat16), [], [], []
  for layer in range(LAYERS):
    value = own(new[layer], out)
    latent, rope = record_words(value)
    latents.append(latent)
    ropes.append(rope)
    if quarters:
      lane = layer * R // 2
      pool = pool.at[at, lane : lane + R // 2].set(latent, mode='drop')
      lane = LAYERS * R // 2 + layer * P // 2
      pool = pool.at[at, lane : lane + P // 2].set(rope, mode='drop')
      gathered = jnp.take(pool, readable(slots), axis=0, mode='clip')
    blocks = [(R // 2, layer), (128, LAYERS * R // 2 // 128)]
    both, lse = attend_words(
      record_query(q[layer], layer), gathered, slots, blocks
    )
    out = jnp.concatenate([both[:, 0], both[:, 1]], axis=-1)
    out = out if quarters else merge_own(q[layer], value, out, lse[:, 0])
    outs.append(out)
  if not quarters:
    record = jnp.concatenate([*latents, *ropes], axis=-1)
    pool = pool.at[at].set(record, mode='drop')
  return pool, outs


def pools(layout):
  rows = LAYERS * TOKENS
  if layout == 'u8_640':
    return shape((rows, 640), jnp.uint8), shape((rows, 4), jnp.float32)
  return {
    'bf16_640': shape((rows, 640), jnp.bfloat16),
    'i32_384': shape((rows, 384), jnp.int32),
    'group': shape((TOKENS, WORDS), jnp.int32),
    'quarters': shape((TOKENS, WORDS), jnp.int32),
  }[layout]


# Of one row of one layer: stored, gathered (read and written), read by the
# kernel.
BYTES = {
  'bf16_640': (1280, 2 * 1280, 1280),
  'u8_640': (656, 2 * 656, 656),
  'i32_384': (1536, 2 * 1536, 1536),
  'group': (1152, 2 * 1152, 1536),
  'quarters': (1152, 4 * 2 * 1152, 1536),
}
LAYOUTS = {
  'bf16_640': padded_rows,
  'u8_640': padded_rows,
  'i32_384': packed_rows,
  'group': group_record,
  'quarters': functools.partial(group_record, quarters=True),
}


def compiled(layout, chip):
  args = (
    pools(layout),
    shape((LAYERS, T, N, R + P), jnp.bfloat16),
    shape((LAYERS, T, R + P), jnp.bfloat16),
    shape((T, K), jnp.int32),
    shape((T,), jnp.int32),
  )
  return compile_for(LAYOUTS[layout], args, chip, donate=(0,))


def kernel_program(layout):
  """The attention of one layer alone, from gathered rows, and its shapes."""
  slots = shape((T, K), jnp.int32)
  if layout.endswith('_640'):
    packed = layout == 'u8_640'
    rows = shape((T, K, 640), jnp.uint8 if packed else jnp.bfloat16)
    scales = shape((T, 4, K), jnp.float32) if packed else None
    q = shape((T, N, 640 if packed else R + P), jnp.bfloat16)
    attend = functools.partial(
      dense_kernel.attend,
      scale=SCALE,
      latent_width=R,
      rope_width=P,
      out_dtype=jnp.bfloat16,
      interpret=False,
    )
    return attend, (q, rows, slots, scales)
  width, blocks = 384, [(384, 0)]
  if layout != 'i32_384':
    width, blocks = WORDS, [(R // 2, 1), (128, LAYERS * R // 2 // 128)]
  q = shape((T, 2, N, 384), jnp.bfloat16)
  attend = functools.partial(attend_words, blocks=blocks)
  return attend, (q, shape((T, K, width), jnp.int32), slots)


def child(layout, chip, folder):
  """Prints one JSON line; with a folder, of cycles."""
  if folder:
    attend, args = kernel_program(layout)
    compile_for(attend, args, chip)
    cycles = read_cycles(pathlib.Path(folder))
    return print(json.dumps(cycles), flush=True)
  found = compiled(layout, chip)
  keep = ('arguments', 'temporaries', 'copies', 'sparsecore')
  print(json.dumps({name: getattr(found, name) for name in keep}), flush=True)


def ask(layout, chip, folder=None):
  """Runs `child` in a process of its own; None where the compiler gives up."""
  env = dict(os.environ)
  command = [sys.executable, __file__, f'--child={layout},{chip}']
  if folder:
    env['LIBTPU_INIT_ARGS'] = f'--xla_jf_dump_static_llo_profile_to={folder}'
    command.append(f'--folder={folder}')
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  lines = [x for x in done.stdout.splitlines() if x.startswith('{')]
  if lines:
    return json.loads(lines[-1])
  if folder:  # the compiler may abort after the kernel's estimate
    return read_cycles(pathlib.Path(folder))
  return dict(error=done.stderr.strip().splitlines()[-1][:300])


def row(layout, chip):
  found = ask(layout, chip)
  with tempfile.TemporaryDirectory() as folder:
    cycles = ask(layout, chip, folder) if 'error' not in found else {}
  kernel = max(
    (n for name, n in cycles.items() if 'attention' in name), default=0
  )
  stored, gathered, read = BYTES[layout]
  rows = LAYERS * T * K
  clock = CLOCKS[chip]
  bandwidth = CHIPS[chip].hbm_bandwidth / CHIPS[chip].devices_per_chip
  cache = LAYERS * TOKENS * stored
  estimate, floor = LAYERS * kernel / clock, rows * read / bandwidth
  gather = rows * gathered / bandwidth
  result = dict(
    layout=layout,
    chip=chip,
    bytes_per_row=stored,
    cache_bytes=cache,
    kernel_cycles=LAYERS * kernel or None,
    kernel_us=round(1e6 * max(estimate, floor), 1) if kernel else None,
    kernel_floor_us=round(1e6 * floor, 1),
    gather_floor_us=round(1e6 * gather, 1),
    total_us=round(1e6 * (max(estimate, floor) + gather), 1),
    **found,
  )
  if 'temporaries' in found:
    result['temporaries_share'] = round(found['temporaries'] / cache, 4)
  return result


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--json')
  parser.add_argument('--chips', default=','.join(SLICES))
  parser.add_argument('--layouts', default=','.join(LAYOUTS))
  parser.add_argument('--child')
  parser.add_argument('--folder')
  flags = parser.parse_args()
  if flags.child:
    return child(*flags.child.split(','), flags.folder)
  rows = []
  for chip in flags.chips.split(','):
    for layout in flags.layouts.split(','):
      rows.append(row(layout, chip))
      print(json.dumps(rows[-1]), flush=True)
  if flags.json:
    command = f'python tests/tpu/row_layout.py --json={flags.json}'
    text = dict(what='compiled, not run', command=command, rows=rows)
    pathlib.Path(flags.json).write_text(json.dumps(text, indent=1) + '\n')


if __name__ == '__main__':
  main()
