"""What fits, what a backend gets by default, what a checkpoint suggests."""

import json

import jax
import plan_cases
import pytest

from glm_jax import load_config
from glm_jax.cache import bytes_per_token, init_cache
from glm_jax.serving import sizing, starting
from glm_jax.serving.config import EngineConfig, buckets
from glm_jax.serving.host_latent import host_latent_plan
from sharding import MeshShape, make_mesh, plan_named

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


@pytest.mark.parametrize('dtype', ['bf16', 'fp8'])
def test_latents_in_host_memory_leave_index_keys_on_the_device(dtype):
  whole = sizing.page_bytes(GLM, dtype)
  plan = host_latent_plan(GLM)
  page = sizing.page_bytes(GLM, dtype, plan)
  keys = 22 * (256 if dtype == 'bf16' else 132)
  assert page == 64 * keys + 2 * GLM.hidden_size
  assert page + sizing.host_page_bytes(GLM, dtype) == whole
  assert whole / page > 15
  size = fit(dtype=dtype, memory=100 * page, page_size=page)
  lines = sizing.lines(size, dtype, longest=True, host_page=whole - page)
  assert size.num_pages == 100
  assert f'{whole / page:.2f} times the tokens' in lines[1]
  work = lambda plan: sizing.workspace_bytes(
    GLM, rows=8, drawn=8, context=64, plan=plan
  )
  assert work(plan) == work(None) + plan.ahead_bytes


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


@pytest.mark.parametrize('name', ['token_split', 'layer_split', 'replicated'])
def test_a_page_of_several_devices_is_what_one_holds(name):
  config, pages = plan_cases.config(), 512
  mesh = make_mesh(MeshShape(1, 2, 1), jax.devices()[:2])
  plan = plan_named(name, config, mesh, slots=2)
  whole = jax.eval_shape(lambda: init_cache(config, pages, dtype='f32'))
  found = plan.cache_bytes(whole)
  held = (found['pools'] + found['slots']) / pages
  page = sizing.page_bytes(config, 'f32', plan)
  assert page == pytest.approx(held, rel=0.02)
  if name == 'token_split':
    assert page < sizing.page_bytes(config, 'f32')


def test_limits_suit_the_backend_unless_given():
  found = starting.limits(None, None, None)
  assert (found.seqs, found.rows, found.compact) == (8, 128, True)
  assert starting.limits(3, 40, False) == starting.Limits(3, 40, False)


def test_compact_engines_have_two_shapes():
  config = EngineConfig(max_model_len=4096, num_pages=64, max_num_seqs=16)
  for drafts in (0, 5):
    many = EngineConfig(4096, 64, 16, num_speculative_tokens=drafts)
    assert len(buckets(many).all()) > 4
    assert len(buckets(starting.compact_shapes(many)).all()) == 2
  assert starting.compact_shapes(config).max_model_len == 4096


def test_sampling_defaults_of_a_checkpoint(tmp_path):
  assert starting.sampling_defaults(tmp_path) == {}
  file = tmp_path / 'generation_config.json'
  given = {'temperature': 1.0, 'top_p': 0.95, 'top_k': None, 'x': 1}
  file.write_text(json.dumps(given))
  found = starting.sampling_defaults(tmp_path)
  assert found == {'temperature': 1.0, 'top_p': 0.95}
  file.write_text(json.dumps({**given, 'do_sample': False}))
  assert starting.sampling_defaults(tmp_path)['temperature'] == 0
