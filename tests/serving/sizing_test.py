"""How many pages fit, and what is said when they do not."""

import jax
import pytest

from glm_jax import load_config
from glm_jax.cache import bytes_per_token, init_cache
from glm_jax.serving import sizing

GLM = load_config('glm52')
TINY = load_config('tiny')


def fit(config=GLM, **changes):
  values = dict(dtype='bf16', memory=1 << 36, max_num_seqs=8)
  return sizing.fit(config, **{**values, **changes})


@pytest.mark.parametrize('dtype', ['bf16', 'f32', 'fp8'])
def test_a_page_is_what_the_cache_allocates(dtype):
  cache = init_cache(TINY, 3, dtype=dtype)
  size = sum(a.nbytes for a in jax.tree.leaves(cache))
  assert sizing.page_bytes(TINY, dtype) * 3 == size


def test_a_page_of_the_published_model():
  page = sizing.page_bytes(GLM, 'bf16')
  rows = sum(
    bytes_per_token(GLM, 'bf16', physical=True, drafter=drafter)
    for drafter in (False, True)
  )
  assert page == 64 * rows + 2 * GLM.hidden_size


def test_the_largest_context_that_fits():
  page = sizing.page_bytes(GLM, 'bf16')
  size = fit(memory=1000 * page + page // 2)
  assert (size.num_pages, size.max_model_len) == (1000, 64_000)
  assert size.concurrency == 1
  size = fit(memory=1000 * page, max_model_len=6400)
  assert (size.num_pages, size.max_model_len) == (1000, 6400)
  assert size.concurrency == 10
  assert size.cache_bytes == 1000 * page


def test_no_more_pages_than_requests_can_use():
  assert fit(TINY, max_model_len=640, max_num_seqs=4).num_pages == 2 * 4 * 10
  assert fit(memory=1 << 60, max_num_seqs=1).num_pages == 2 * 16384
  assert fit(num_pages=7).num_pages == 7


def test_what_does_not_fit_is_refused():
  page = sizing.page_bytes(GLM, 'bf16')
  with pytest.raises(ValueError, match='no page of'):
    fit(memory=page - 1)
  with pytest.raises(ValueError, match=r'--max_model_len=640\b'):
    fit(memory=10 * page, max_model_len=641)
  for length in (0, 1, 1 << 21):
    with pytest.raises(ValueError, match='window of the model'):
      fit(max_model_len=length)


def test_available_bytes_are_bounded_without_device_memory():
  assert 0 < sizing.available_bytes(0.9) <= 4 << 30


def test_the_workspace_grows_with_what_it_holds():
  base = dict(rows=512, drawn=64, context=1 << 20)
  size = lambda **more: sizing.workspace_bytes(GLM, **{**base, **more})
  assert size(drawn=128) - size() == 64 * 24 * GLM.vocab_size
  assert size(rows=1024) > size() and size(context=1 << 21) > size()
