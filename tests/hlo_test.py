"""Costs read from HLO against counts made by hand."""
# ruff: noqa: E501  (HLO puts an instruction on a line)

import textwrap

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from glm_jax import hlo
from sharding.chips import CHIPS
from sharding.planner.cost import Cost, Loops, module_cost
from sharding.planner.frames import entry_frame

CHIP = CHIPS['v6e']


def module(text):
  return hlo.parse(textwrap.dedent(text))


def compiled(f, *args):
  return hlo.parse(jax.jit(f).lower(*args).compile().as_text())


def loop_text(
  body, limit='constant(7)', step='constant(2)', first='constant(1)'
):
  """A loop over (counter, [8, 16] x, limit) with `body` in its middle."""
  return module(f"""
    HloModule m, is_scheduled=true

    %body (p: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {{
      %p = (s32[]{{:T(128)}}, f32[8,16]{{1,0:T(8,128)}}, s32[]) parameter(0)
      %i = s32[] get-tuple-element(%p), index=0
      %x = f32[8,16]{{1,0}} get-tuple-element(%p), index=1
      %n = s32[] get-tuple-element(%p), index=2
      %step = s32[] {step}
      %next = s32[] add(%i, %step)
      {body}
      ROOT %t = (s32[], f32[8,16], /*index=2*/s32[]) tuple(%next, %y, %n)
    }}

    %cond (p.1: (s32[], f32[8,16], s32[])) -> pred[] {{
      %p.1 = (s32[], f32[8,16], s32[]) parameter(0)
      %i.1 = s32[] get-tuple-element(%p.1), index=0
      %n.1 = s32[] get-tuple-element(%p.1), index=2
      ROOT %lt = pred[] compare(%i.1, %n.1), direction=LT
    }}

    ENTRY %main (a: f32[8,16], b: s32[]) -> f32[8,16] {{
      %a = f32[8,16] parameter(0)
      %b = s32[] parameter(1)
      %first = s32[] {first}
      %limit = s32[] {limit}
      %t.1 = (s32[], f32[8,16], s32[]) tuple(%first, %a, %limit)
      %w = (s32[], f32[8,16], s32[]) while(%t.1), condition=%cond, body=%body, metadata={{op_name="jit(f)/draft/while"}}
      ROOT %out = f32[8,16] get-tuple-element(%w), index=1
    }}
  """)


DOT = (
  '%k = f32[16,16] constant({...})\n'
  '      %y = f32[8,16] dot(%x, %k), lhs_contracting_dims={1}, '
  'rhs_contracting_dims={0}'
)


class TripCountTest(parameterized.TestCase):
  @parameterized.parameters(
    ('constant(7)', 'constant(2)', 'constant(1)', 3),
    ('constant(8)', 'constant(2)', 'constant(1)', 4),
    ('constant(1)', 'constant(2)', 'constant(1)', 0),
    ('constant(1024)', 'constant(1)', 'constant(0)', 1024),
    ('copy(%b)', 'constant(1)', 'constant(0)', None),
    ('constant(7)', 'copy(%n)', 'constant(1)', 1),
  )
  def test_counter_limit_and_step(self, limit, step, first, trips):
    m = loop_text(DOT, limit, step, first)
    loop = m.entry.by_name['w']
    self.assertEqual(entry_frame(m).trip_count(loop), trips)

  def test_a_limit_that_the_body_changes_is_unknown(self):
    m = loop_text(DOT + '\n      %n2 = s32[] add(%n, %n)')
    changed = dict(m.computations)
    text = [i for i in changed['body'].instructions if i.name != 't']
    root = hlo._instruction(
      't', '(s32[], f32[8,16], s32[]) tuple(%next, %y, %n2)'
    )
    changed['body'] = hlo.Computation('body', (*text, root), root)
    m = hlo.Module(changed, m.entry)
    self.assertIsNone(entry_frame(m).trip_count(m.entry.by_name['w']))

  def test_a_compiled_nest_of_loops(self):
    def f(x, w):
      inner = lambda _, x: jnp.tanh(x @ w)
      body = lambda i, x: jax.lax.fori_loop(0, 5, inner, x) + i
      return jax.lax.scan(lambda x, i: (body(i, x), None), x, jnp.arange(3))[0]

    m = compiled(f, jnp.ones((8, 16)), jnp.ones((16, 16)))
    self.assertEqual(module_cost(m).flops, 3 * 5 * 2 * 8 * 16 * 16)


class CostTest(parameterized.TestCase):
  def test_dots_in_loops(self):
    one = 2 * 8 * 16 * 16
    self.assertEqual(module_cost(loop_text(DOT)).flops, 3 * one)
    # Of a loop whose length is data the caller must say how long it is.
    unknown = loop_text(DOT, limit='copy(%b)', step='constant(1)')
    loops = Loops()
    self.assertEqual(module_cost(unknown, loops).flops, one)
    self.assertEqual(loops.unknown, {'jit(f)/draft/while'})
    loops = Loops({r'draft/while$': 6})
    self.assertEqual(module_cost(unknown, loops).flops, 6 * one)
    self.assertEqual(loops.assumed, {'jit(f)/draft/while': 6})
    self.assertFalse(loops.unknown)

  def test_kernels_count_what_they_declare(self):
    text = (
      '%y = f32[8,16] custom-call(%x), custom_call_target="tpu_custom_call", '
      'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000",'
      '"transcendentals":"9","bytes_accessed":"77",'
      '"remote_bytes_transferred":"0"}}}'
    )
    cost = module_cost(loop_text(text))
    self.assertEqual(cost.flops, 3 * 1000)
    self.assertEqual(cost.declared, 3 * 1000)
    self.assertEqual(cost.bytes, 3 * 77 + self._loop_bytes())

  def test_kernels_that_declare_nothing_are_named(self):
    text = (
      '%y = f32[8,16] custom-call(%x), custom_call_target="tpu_custom_call", '
      'metadata={op_name="jit(f)/quiet"}'
    )
    loops = Loops()
    cost = module_cost(loop_text(text), loops)
    self.assertEqual((cost.flops, cost.bytes), (0, self._loop_bytes()))
    self.assertEqual(loops.silent, {'jit(f)/quiet'})

  def _loop_bytes(self):
    """Of everything but the loop's work."""
    empty = '%y = f32[8,16] bitcast(%x)'
    return module_cost(loop_text(empty)).bytes

  @parameterized.parameters(
    # [T, D] x [D, F] in the forms a TPU gives it.
    ('f32[8,32]', 'bf16[8,16]', 'bf16[16,32]', 'bf_io->bf', '', 8 * 16 * 32),
    ('f32[8,32]', 'bf16[8,16]', 'bf16[32,16]', 'bf_oi->bf', '', 8 * 16 * 32),
    # Four products at once: a window of four with one tap that meets.
    (
      'f32[4,8,32]',
      'bf16[4,8,16]',
      'bf16[4,16,32]',
      '0bf_0io->0bf',
      'window={size=4 stride=3 pad=0_0 lhs_dilate=4}, ',
      4 * 8 * 16 * 32,
    ),
    # A real convolution: 5 outputs, 3 taps, the outer ones half on padding.
    (
      'f32[1,5,2]',
      'f32[1,5,7]',
      'f32[3,7,2]',
      'b0f_0io->b0f',
      'window={size=3 pad=1_1}, ',
      (3 * 5 - 2) * 7 * 2,
    ),
  )
  def test_convolutions(self, out, image, kernel, labels, window, macs):
    m = module(f"""
      ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
        %a = {image} parameter(0)
        %b = {kernel} parameter(1)
        ROOT %y = {out} convolution(%a, %b), {window}dim_labels={labels}, operand_precision={{highest,highest}}
      }}
    """)
    cost = module_cost(m)
    self.assertEqual(cost.flops, 2 * macs)
    self.assertEqual(cost.passes, 6 * 2 * macs)

  def test_a_product_of_one_row_is_a_multiply_and_a_reduce(self):
    text = """
      %add (l: f32[], r: f32[]) -> f32[] {{
        %l = f32[] parameter(0)
        %r = f32[] parameter(1)
        ROOT %s = f32[] add(%l, %r)
      }}

      %fused (p0: bf16[16], p1: bf16[32,16]) -> f32[32] {{
        %p0 = bf16[16] parameter(0)
        %p1 = bf16[32,16] parameter(1)
        %row = bf16[32,16] broadcast(%p0), dimensions={{1}}
        %m = bf16[32,16] multiply(%row, %p1)
        %c = f32[32,16] convert(%m)
        %zero = f32[] constant(0)
        ROOT %r.1 = f32[32] reduce(%c, %zero), dimensions={{1}}, to_apply=%add, metadata={{op_name="jit(f)/{name}"}}
      }}

      ENTRY %main (a: bf16[16], b: bf16[32,16]) -> f32[32] {{
        %a = bf16[16] parameter(0)
        %b = bf16[32,16] parameter(1)
        ROOT %f = f32[32] fusion(%a, %b), kind=kLoop, calls=%fused
      }}
    """
    dot = module(text.format(name='td,fd->tf/dot_general'))
    cost = module_cost(dot)
    self.assertEqual(cost.flops, 2 * 32 * 16)
    self.assertEqual(cost.passes, 0)  # the vector unit did it
    self.assertEqual(cost.bytes, 2 * 16 + 2 * 32 * 16 + 4 * 32)
    norm = module(text.format(name='reduce_sum'))
    self.assertEqual(module_cost(norm).flops, 0)

  def test_slices_and_updates_move_what_they_touch(self):
    m = module("""
      %fused (p0: bf16[1024,640], p1: s32[], p2: bf16[8,640]) -> bf16[1024,640] {
        %p0 = bf16[1024,640] parameter(0)
        %p1 = s32[] parameter(1)
        %p2 = bf16[8,640] parameter(2)
        %z = s32[] constant(0)
        ROOT %u = bf16[1024,640] dynamic-update-slice(%p0, %p2, %p1, %z)
      }

      ENTRY %main (a: bf16[1024,640], i: s32[4]) -> bf16[4,640] {
        %a = bf16[1024,640] parameter(0)
        %i = s32[4] parameter(1)
        %g = bf16[4,640]{1,0:T(8,128)(2,1)} gather(%a, %i), offset_dims={1}
        %v = bf16[8,640]{1,0:T(8,128)(2,1)S(1)} slice(%a), slice={[0:8], [0:640]}
        %n = s32[] constant(3)
        %f = bf16[1024,640] fusion(%a, %n, %v), kind=kLoop, calls=%fused
        ROOT %c = bf16[4,640] copy(%g)
      }
    """)
    row = 2 * 640
    gather = 2 * 4 * row + 4 * 4
    update = 8 * row + 4  # the new rows lie on the chip
    self.assertEqual(module_cost(m).bytes, gather + update + 2 * 4 * row)

  @parameterized.parameters(
    (', output_to_operand_aliasing={{}: (0, {})}', 2 * 8 * 640 + 4),
    ('', 1024 * 640 + 8 * 640 + 4),
  )
  def test_a_tile_written_through_another_tiling(self, alias, moved):
    m = module(
      """
      %view (v: u8[1024,640]) -> u8[1024,640] {
        %v = u8[1024,640]{1,0:T(32,128)(4,1)} parameter(0)
        ROOT %t = u8[1024,640]{1,0:T(8,128)(4,1)} copy(%v)
      }

      %fused (p0: u8[1024,640], p1: s32[]) -> u8[1024,640] {
        %p0 = u8[1024,640] parameter(0)
        %p1 = s32[] parameter(1)
        %z = s32[] constant(0)
        %w = u8[1024,640] fusion(%p0), kind=kLoop ALIAS, calls=%view
        %d = u8[8,640] dynamic-slice(%w, %p1, %z), dynamic_slice_sizes={8,640}
        %n = u8[8,640] negate(%d)
        ROOT %u = u8[1024,640] dynamic-update-slice(%w, %n, %p1, %z)
      }

      ENTRY %main (a: u8[1024,640], i: s32[]) -> u8[1024,640] {
        %a = u8[1024,640] parameter(0)
        %i = s32[] parameter(1)
        ROOT %f = u8[1024,640] fusion(%a, %i), kind=kLoop, calls=%fused
      }
    """.replace(' ALIAS', alias)
    )
    self.assertEqual(module_cost(m).bytes, moved)

  def test_a_layer_sliced_from_a_stack_two_fusions_down(self):
    m = module("""
      %slice (p0: bf16[18,64,128], p1: s32[]) -> bf16[64,128] {
        %p0 = bf16[18,64,128] parameter(0)
        %p1 = s32[] parameter(1)
        %z = s32[] constant(0)
        %s = bf16[1,64,128] dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,64,128}
        ROOT %b = bf16[64,128] bitcast(%s)
      }

      %fused (q0: bf16[18,64,128], q1: s32[], q2: bf16[8,128]) -> f32[8,64] {
        %q0 = bf16[18,64,128] parameter(0)
        %q1 = s32[] parameter(1)
        %q2 = bf16[8,128] parameter(2)
        %w = bf16[64,128] fusion(%q0, %q1), kind=kLoop, calls=%slice
        ROOT %c = f32[8,64] convolution(%q2, %w), dim_labels=bf_oi->bf
      }

      ENTRY %main (a: bf16[18,64,128], i: s32[], x: bf16[8,128]) -> f32[8,64] {
        %a = bf16[18,64,128] parameter(0)
        %i = s32[] parameter(1)
        %x = bf16[8,128] parameter(2)
        ROOT %f = f32[8,64] fusion(%a, %i, %x), kind=kOutput, calls=%fused
      }
    """)
    cost = module_cost(m)
    self.assertEqual(cost.flops, 2 * 8 * 64 * 128)
    moved = 2 * 64 * 128 + 4 + 2 * 8 * 128 + 4 * 8 * 64
    self.assertEqual(cost.bytes, moved)

  def test_time_is_the_slower_side(self):
    compute = Cost(flops=1, passes=CHIP.peak())
    memory = Cost(bytes=2 * CHIP.bandwidth)
    self.assertEqual(compute.seconds(CHIP), 1)
    self.assertEqual((compute + memory).seconds(CHIP), 2)
    tpu7x = CHIPS['tpu7x']
    fp8 = Cost(passes=tpu7x.peak(), fp8=tpu7x.peak())
    self.assertEqual(fp8.seconds(tpu7x), 0.5)

  def test_text_that_is_no_module(self):
    with self.assertRaisesRegex(ValueError, 'not an HLO module'):
      hlo.parse('nothing here')
