"""The whole in a minute: the embedded glm-nano writes code, with drafting.

glm-nano is small (12 M parameters) but real: the published architecture, an
index shared by groups of four layers, top-256 of up to 8,192 keys, a drafter
of seven steps. The prompt is longer than top-k, so the index decides what is
read. The same text is written twice, without and with drafts; greedy drafting
changes the speed, never a token. Needs neither torch nor transformers.
"""

from __future__ import annotations

import functools
import string
import time

from absl import flags

from glm_jax import cli

_NEW = flags.DEFINE_integer('max_new_tokens', 96, 'Tokens to write.')
_DRAFTS = flags.DEFINE_integer('num_speculative_tokens', 7, 'Drafts a round.')
_PROMPT = '''\
"""A small vector in the plane."""

import math


class Vector:
    """A point or a direction, by its two coordinates."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        """Return the sum of two vectors."""
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        """Return the difference of two vectors."""
        return Vector(self.x - other.x, self.y - other.y)

    def __mul__(self, scale):
        """Return the vector scaled by a number."""
        return Vector(self.x * scale, self.y * scale)

    def dot(self, other):
        """Return the dot product of two vectors."""
        return self.x * other.x + self.y * other.y

    def length(self):
        """Return the Euclidean length."""
        return math.sqrt(self.dot(self))

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def __repr__(self):
        return f"Vector({self.x}, {self.y})"


def test_add():
    a = Vector(1, 2)
    b = Vector(3, 4)
    assert a + b == Vector(4, 6)


def test_sub():
    a = Vector(1, 2)
    b = Vector(3, 4)
    assert'''


def main() -> bool:
  from glm_jax import Tokenizer, generate, load_model
  from glm_jax.embedded import EMBEDDED
  from glm_jax.plan import ROW_TILE, LocalPlan

  begin = time.perf_counter()
  model = load_model(dtype='f32')
  tokenizer = Tokenizer.load(EMBEDDED)
  prompt = tokenizer.encode(_PROMPT)
  c = model.config
  full = c.indexer_types.count('full')
  print(
    f'glm-nano: {c.num_layers} layers, {full} of them with an indexer, '
    f'top-{c.indexer.topk}; loaded in {time.perf_counter() - begin:.1f} s'
  )
  outs = []
  for K in (0, _DRAFTS.value):
    run = functools.partial(
      generate,
      model,
      [prompt],
      max_new_tokens=_NEW.value,
      eos_token_ids=(),
      tokenizer=tokenizer,
      num_speculative_tokens=K,
      plan=LocalPlan(row_tile=ROW_TILE),
    )
    cli.log(f'compiling and running with {K} drafts a round ...')
    run(stop=tuple(string.printable))  # compiles, ends at once
    outs.append(run())
  plain, drafted = outs
  print(f'\n--- the end of the prompt ({len(prompt)} tokens)')
  print('\n'.join(_PROMPT.splitlines()[-5:]), end='')
  print(plain.text[0])
  print('\n---\n')
  same = plain.tokens == drafted.tokens
  statistics = drafted.drafts
  print(f'{"":>24}{"tokens/s":>10}')
  for name, out in (('one at a time', plain), ('with drafts', drafted)):
    print(f'{name:>24}{_NEW.value / out.seconds_decode:>10.1f}')
  rates = ', '.join(
    f'{a}/{d}' for a, d in zip(statistics.accepted, statistics.drafted)
  )
  print(
    f'\naccept length {statistics.accept_length:.2f} of {_DRAFTS.value} '
    f'drafts a round, {statistics.accept_length_with_bonus:.2f} with the '
    f'bonus token\naccepted by draft step: {rates}\n'
    f'the index was computed {statistics.index_calls} times in '
    f'{statistics.passes} rounds of drafting\n'
    f'same tokens with and without drafts: {"yes" if same else "NO"}'
  )
  return same


if __name__ == '__main__':
  cli.run(main)
