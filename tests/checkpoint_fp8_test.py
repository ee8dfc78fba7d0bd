"""fp8 checkpoints and changes of format: partial blocks, straddled heads."""

import math

import checkpoint_files as cf
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.checkpoints import PublishedCheckpoint, load_model
from glm_jax.mla import Mla

BLOCK = (16, 16)
named, raises = cf.named, cf.raises
# hidden 64 and kv_a's 24 rows, q_lora 40, experts of 24: partial blocks;
# kv_b has 56 rows a head.
ODD = {'q_lora_rank': 40, 'intermediate_size': 52}
SPEC = PartitionSpec(None, 'model', 'data', None)  # of experts, under `Plan`
QUANTIZED = {
  'quantization_config': {
    'quant_method': 'fp8',
    'fmt': 'e4m3',
    'activation_scheme': 'dynamic',
    'weight_block_size': list(BLOCK),
  }
}


@pytest.fixture(scope='module')
def fp8(tmp_path_factory):
  """(directory, config, tensors, the wide tensors it was made of)."""
  config = cf.t1(num_nextn_predict_layers=1, **ODD)
  wide = cf.tensors(config)
  values = cf.quantized(wide, BLOCK)
  directory = tmp_path_factory.mktemp('fp8')
  cf.write(directory, config | QUANTIZED, values, shards=2)
  return directory, config, values, wide


def dequantized(values, dtype):
  """The numbers of an fp8 checkpoint, from whole matrices."""
  out = {}
  for name, value in values.items():
    if name.endswith('_scale_inv'):
      continue
    if value.dtype == cf.FP8:
      scales = values[f'{name}_scale_inv']
      value = value.astype(np.float32) * cf.spread(scales, value.shape, BLOCK)
    bias = name.endswith('correction_bias')
    out[name] = value if bias else value.astype(dtype)
  return out


def test_auto_keeps_every_bit(fp8):
  directory, _, values, _ = fp8
  model = load_model(directory)
  cf.assert_same(named(model), values)
  assert model.experts.block == BLOCK


@pytest.mark.parametrize('dtype', ['bf16', 'f32'])
def test_wide_is_dequantized_in_float32(fp8, dtype):
  directory, _, values, _ = fp8
  expected = dequantized(values, {'bf16': cf.BF16, 'f32': cf.F32}[dtype])
  cf.assert_same(named(load_model(directory, weight_dtype=dtype)), expected)


def test_dtype_f32_keeps_fp8_matrices(fp8):
  directory, _, values, _ = fp8
  model = load_model(directory, dtype='f32')
  assert model.embed.dtype == cf.F32 and model.experts.gate.dtype == cf.FP8


def test_kv_b_blocks_straddle_heads(fp8):
  directory, config, values, _ = fp8
  name = 'model.layers.4.self_attn.kv_b_proj.weight'
  whole = dequantized({k: values[k] for k in values if name in k}, cf.F32)[name]
  nope, v = config['qk_nope_head_dim'], config['v_head_dim']
  assert (nope + v) % BLOCK[0] and nope % BLOCK[0]
  both = whole.reshape(4, nope + v, -1)
  for weight_dtype in 'auto', 'f32':
    block, _ = PublishedCheckpoint(directory).load_block(
      4, dtype='f32', weight_dtype=weight_dtype
    )
    assert isinstance(block.attention, Mla)
    keys, queries = block.attention.up_projections()
    assert np.array_equal(keys, both[:, :nope])
    assert np.array_equal(queries, both[:, nope:])


def test_wide_to_fp8_quantizes_what_the_published_checkpoint_does(
  fp8, tmp_path
):
  _, config, values, wide = fp8
  # The block of a wide checkpoint is 128: larger than these matrices.
  cf.write(tmp_path / 'one', config, wide)
  model = load_model(tmp_path / 'one', weight_dtype='fp8')
  cf.assert_same(named(model), cf.quantized(wide, (128, 128)))
  # A config that promises fp8 over wide tensors: asked for, never silent.
  cf.write(tmp_path / 'two', config | QUANTIZED, wide)
  with raises("gate_proj.weight is BF16, not F8_E4M3,.*weight_dtype='fp8' r"):
    load_model(tmp_path / 'two')
  model = load_model(tmp_path / 'two', weight_dtype='fp8')
  cf.assert_same(named(model), values)
  cf.assert_same(named(load_model(tmp_path / 'two', dtype='bf16',
                                  weight_dtype='bf16')), wide)  # fmt: skip


def test_faults_of_scales(fp8, tmp_path):
  _, config, values, _ = fp8
  name = 'model.layers.0.self_attn.q_a_proj.weight'
  scale = f'{name}_scale_inv'
  write = lambda case, **keys: cf.write(
    tmp_path / case, config | QUANTIZED | keys, changed
  )
  changed = {k: v for k, v in values.items() if k != scale}
  with raises(f'{name} is F8_E4M3 without {scale}'):
    load_model(write('absent'))
  changed = values | {scale: values[scale][:, :-1]}
  with raises(rf'{scale} is F32 \[3, 3\], not F32 \[3, 4\]'):
    load_model(write('shape'))
  changed = values | {scale: values[scale].astype(cf.BF16)}
  with raises(f'{scale} is BF16'):
    load_model(write('kind'))
  changed = values | {name: values[name].astype(cf.BF16)}
  with raises(f'surplus {scale}'):
    load_model(write('wide'), weight_dtype='bf16')
  changed = values
  with raises('F8_E4M3 but config.json has no quantization_config'):
    load_model(write('none', quantization_config=None))


@pytest.mark.parametrize('width', [32, 24])
def test_fused_experts_are_split_after_dequantizing(tmp_path, width):
  config = cf.t1(moe_intermediate_size=width)
  # Quantised as fused: blocks of 16 straddle gate and up at width 24.
  fused = cf.fuse_experts(cf.tensors(config))
  values = {}
  for name, x in fused.items():
    if '.experts.' in name:
      parts = [cf.quantize(matrix, BLOCK) for matrix in x]
      values[name], values[f'{name}_scale_inv'] = map(np.stack, zip(*parts))
    else:
      values |= cf.quantized({name: x}, BLOCK)
  cf.write(tmp_path, config | QUANTIZED, values)
  model = load_model(tmp_path, weight_dtype='f32')
  name = 'model.layers.6.mlp.experts.gate_up_proj'
  for e in range(4):
    scales = cf.spread(values[f'{name}_scale_inv'][e], (2 * width, 64), BLOCK)
    both = values[name][e].astype(np.float32) * scales
    assert np.array_equal(model.experts.gate[3, e], both[:width])
    assert np.array_equal(model.experts.up[3, e], both[width:])
  if width % BLOCK[0]:
    with raises("blocks that straddle gate and up.*weight_dtype='bf16'"):
      load_model(tmp_path)
    return
  model = load_model(tmp_path)
  assert np.array_equal(model.experts.up[3, 1], values[name][1, width:])
  scales = values[f'{name}_scale_inv'][1, width // 16 :]
  assert np.array_equal(model.experts.up_scale[3, 1], scales)


class Plan:
  """Spreads wide axes over a mesh of CPU devices."""

  def __init__(self, *shape):
    shape = shape or (2, 4)
    devices = np.array(jax.devices()[: math.prod(shape)])
    self.mesh = Mesh(devices.reshape(shape), ('data', 'model'))
    self.seen = {}

  def sharding(self, axes, shape):
    assert len(axes) == len(shape)
    table = {'expert': 'model', 'heads': 'model', 'embed': 'data'}
    table['expert_mlp'] = 'data'
    spec = [table.get(a) for a in axes]
    sizes = {None: 1, **self.mesh.shape}
    spec = [s if n % sizes[s] == 0 else None for s, n in zip(spec, shape)]
    self.seen[axes] = spec
    return NamedSharding(self.mesh, PartitionSpec(*spec))


@pytest.mark.parametrize('weight_dtype', ['auto', 'bf16'])
def test_plan_places_every_parameter(fp8, weight_dtype):
  directory, _, values, _ = fp8
  plan = Plan()
  model = load_model(directory, weight_dtype=weight_dtype, plan=plan)
  expected = values
  if weight_dtype == 'bf16':
    expected = dequantized(values, cf.BF16)
  cf.assert_same(named(model), expected)
  assert model.experts.gate.sharding.spec == SPEC
  assert len(model.embed.sharding.device_set) == 8
  assert plan.seen[(None, 'expert', 'expert_mlp', None)]


def test_each_shard_is_read_once(tmp_path):
  config = cf.t1()
  values = cf.tensors(config)
  cf.write(tmp_path, config, values)
  checkpoint = PublishedCheckpoint(tmp_path)

  class ByExpert(Plan):
    def sharding(self, axes, shape):
      spec = ['model' if a == 'expert' else None for a in axes]
      return NamedSharding(self.mesh, PartitionSpec(*spec))

  model = checkpoint.load_model(plan=ByExpert())
  assert model.experts.down.addressable_shards[0].data.shape[1] == 1
  total = sum(v.nbytes for v in values.values())
  assert checkpoint.files.bytes_read == total
