"""The engine gives the tokens that each request gets alone."""

from absl.testing import parameterized
from serving import (
  alone,
  check_empty,
  make_engine,
  random_prompt,
  request,
  rng,
  serve,
)

LENGTHS = (48, 5, 70, 64, 1, 130, 65)


class IdentityTest(parameterized.TestCase):
  @parameterized.parameters(0, 3)
  def test_any_batching_gives_the_tokens_of_single_requests(self, K):
    engine = make_engine()
    texts = [random_prompt(rng(i), n) for i, n in enumerate(LENGTHS)]
    got = serve(
      engine,
      [
        request(str(i), text, num_speculative_tokens=K if i % 3 else 3)
        for i, text in enumerate(texts)
      ],
    )
    for i, text in enumerate(texts):
      assert got[str(i)] == alone(0, text, 8), i
    check_empty(engine)
