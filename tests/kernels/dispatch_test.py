"""Which implementation runs, and that all of them take the same arguments."""

import inspect

from absl.testing import absltest, parameterized

import pallas_kernels
from pallas_kernels import (
  Choice,
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


if __name__ == '__main__':
  absltest.main()
