"""Which implementation runs, and that all of them take the same arguments."""

import functools
import inspect
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.experimental import checkify
from jax.experimental import pallas as pl

import pallas_kernels
from pallas_kernels import (
  Choice,
  choices,
  choose,
  dispatch,
  grouped_matmul,
  indexer_scores,
  streaming_topk,
  topk_gather_attention,
)

OPS = {
  'grouped_matmul': grouped_matmul,
  'indexer_scores': indexer_scores,
  'streaming_topk': streaming_topk,
  'topk_gather_attention': topk_gather_attention,
}


def available(op):
  return inspect.getmodule(OPS[op]).AVAILABLE


def array_arguments(f):
  """Names of the positional arguments, in order."""
  kinds = inspect.signature(f).parameters.values()
  return [p.name for p in kinds if p.kind is not p.KEYWORD_ONLY]


class DispatchTest(parameterized.TestCase):
  def test_none_chooses_and_says_why(self):
    choice = choose('op', None, {'xla': len, 'reference': len})
    self.assertEqual((choice.op, choice.implementation), ('op', 'xla'))
    self.assertTrue(choice.reason)

  def test_a_name_runs_that_implementation(self):
    for name in ('xla', 'reference'):
      choice = choose('op', name, {'xla': len, 'reference': len})
      self.assertEqual(choice, Choice('op', name, 'asked for by name'))

  def test_unknown_name(self):
    with self.assertRaisesRegex(
      ValueError, "implementation='cuda' is unknown: use None or one of"
    ):
      choose('op', 'cuda', {'xla': len})

  def test_known_name_that_the_op_lacks(self):
    with self.assertRaisesRegex(
      NotImplementedError, r"op has no 'reference' implementation.*\['xla'\]"
    ):
      choose('op', 'reference', {'xla': len})

  @parameterized.parameters(*OPS)
  def test_every_op_has_a_specification_and_a_portable_form(self, op):
    self.assertContainsSubset(('reference', 'xla'), available(op))
    self.assertContainsSubset(available(op), dispatch.IMPLEMENTATIONS)

  @parameterized.parameters(*OPS)
  def test_same_array_arguments_in_the_same_order(self, op):
    public = array_arguments(OPS[op])
    for name, implementation in available(op).items():
      with self.subTest(name):
        self.assertEqual(array_arguments(implementation), public)

  @parameterized.parameters(*OPS)
  def test_public_names(self, op):
    self.assertIn(op, pallas_kernels.__all__)
    self.assertIs(getattr(pallas_kernels, op), OPS[op])
    default = inspect.signature(OPS[op]).parameters['implementation'].default
    self.assertIsNone(default)


def doubled(x):
  return x * 2


def doubled_on_tpu(x, *, refuse=None):
  if refuse:
    raise NotImplementedError(refuse)

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2

  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(kernel, out_shape=out, name='doubled')(x)


def double(x, op, **options):
  available = {
    'xla': doubled,
    'tpu': functools.partial(doubled_on_tpu, **options),
  }
  return dispatch.run(choose(op, None, available), available, x)


class RunTest(parameterized.TestCase):
  """None stages both forms; the platform lowered for decides."""

  def lowered(self, f, *platforms):
    traced = jax.jit(f).trace(jnp.ones((8, 128)))
    return traced.lower(lowering_platforms=platforms).as_text()

  def test_the_platform_lowered_for_decides(self):
    f = lambda x: double(x, 'decides')
    self.assertIn('tpu_custom_call', self.lowered(f, 'tpu'))
    self.assertNotIn('tpu_custom_call', self.lowered(f, 'cpu'))
    self.assertEqual(float(jax.jit(f)(jnp.ones((8, 128)))[0, 0]), 2)
    (choice,) = [c for c in choices() if c.op == 'decides']
    self.assertEqual((choice.implementation, choice.kernels), ('xla', ('tpu',)))

  def test_inside_scan_grad_vmap_and_checkify(self):
    f = lambda x: double(x, 'transformed')
    x = jnp.ones((8, 128))
    scanned = lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]
    self.assertEqual(float(jax.jit(scanned)(x)[0, 0]), 8)
    self.assertEqual(float(jax.vmap(f)(x[None])[0, 0, 0]), 2)
    error, out = checkify.checkify(jax.jit(f))(x)
    error.throw()
    self.assertEqual(float(out[0, 0]), 2)
    self.assertIn('tpu_custom_call', self.lowered(scanned, 'tpu'))

  def test_what_a_kernel_refuses_is_left_to_xla_and_said(self):
    f = lambda x: double(x, 'refused', refuse='only on Sundays')
    self.assertNotIn('tpu_custom_call', self.lowered(f, 'tpu'))
    (choice,) = [c for c in choices() if c.op == 'refused']
    self.assertEqual((choice.implementation, choice.kernels), ('xla', ()))
    self.assertIn('only on Sundays', choice.reason)

  @parameterized.parameters(
    (True, False, 'cosine', ('hopper',)),
    (True, True, 'tanh', ('gpu',)),
    (False, False, 'tanh', ('gpu',)),
  )
  def test_hopper_comes_first_where_there_is_one(self, here, refuse, op, kept):
    def hopper(x):
      if refuse:
        raise NotImplementedError('too wide')
      return jnp.cos(x)

    available = {'xla': doubled, 'gpu': jnp.tanh, 'hopper': hopper}
    with mock.patch.object(dispatch, '_on_hopper', return_value=here):
      name = f'hopper_{here}_{refuse}'
      f = lambda x: dispatch.run(choose(name, None, available), available, x)
      text = self.lowered(f, 'cuda')
      for other in ('cosine', 'tanh'):
        self.assertEqual(f'stablehlo.{other}' in text, other == op)
      self.assertNotIn('stablehlo.cosine', self.lowered(f, 'cpu'))
    (choice,) = [c for c in choices() if c.op == name]
    self.assertEqual(choice.kernels, kept)
    self.assertEqual(choice.on('cuda'), kept[0])
    self.assertEqual(choice.on('cpu'), 'xla')
    self.assertEqual('too wide' in choice.reason, refuse)

  def test_a_named_kernel_runs_or_raises(self):
    available = {'xla': doubled, 'tpu': doubled_on_tpu}
    choice = choose('named', 'tpu', available)
    with self.assertRaisesRegex(NotImplementedError, 'on Sundays'):
      dispatch.run(choice, available, jnp.ones((8, 128)), refuse='on Sundays')
    with self.assertRaisesRegex(ValueError, 'interpret'):
      dispatch.run(choice, available, jnp.ones((8, 128)))
    self.assertIn(choice, choices())


if __name__ == '__main__':
  absltest.main()
