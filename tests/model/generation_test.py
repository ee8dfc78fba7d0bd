"""`generate` and launch/generate.py: batches, stops, noise, bad input."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl.testing import parameterized
from small_models import (
  LENGTHS,
  TILED,
  make_model,
  prompts,
  small_config,
  small_model,
)
from tokenizers import decoders, models, pre_tokenizers

from glm_jax import forward, generate
from glm_jax.checkpoints import load_model, save_published
from glm_jax.plan import LocalPlan
from glm_jax.text import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]


def write_tokenizer(directory):
  """A tokenizer of single letters: id i is the letter chr(33 + i)."""
  vocab = {chr(33 + i): i for i in range(90)}
  backend = tokenizers.Tokenizer(models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.save(str(directory / 'tokenizer.json'))


class GenerateTest(parameterized.TestCase):
  def test_a_batch_of_unequal_lengths_equals_single_requests(self):
    model, texts = small_model(0), prompts(0, LENGTHS)
    together = generate(model, texts, max_new_tokens=6, plan=TILED).tokens
    for i in (1, 4):
      alone = generate(
        model, [texts[i]], max_new_tokens=6, plan=TILED, prefill_chunk=8
      )
      assert alone.tokens == [together[i]]

  def test_noise_is_a_function_of_seed_and_position_not_of_the_slot(self):
    model, texts = small_model(0), prompts(0, LENGTHS)
    run = lambda texts, seed: (
      generate(
        model, texts, max_new_tokens=6, temperature=1.0, seed=seed, plan=TILED
      ).tokens
    )
    together = run(texts, 40)
    assert run([texts[1]], 41) == [together[1]]
    assert run([texts[1]], 42) != [together[1]]

  def test_every_eos_id_stops(self):
    model, texts = small_model(0), prompts(0, LENGTHS)
    free = generate(model, texts, max_new_tokens=6, plan=TILED).tokens
    eos = (free[0][2], free[1][3], free[2][1])
    out = generate(
      model, texts, max_new_tokens=6, plan=TILED, eos_token_ids=eos
    )
    for got, want in zip(out.tokens, free):
      ends = [i for i, t in enumerate(want) if t in eos]
      cut = ends[0] + 1 if ends else 6
      assert got == want[:cut]

  def test_stop_strings_cut_the_text_and_end_the_sequence(self):
    model, texts = small_model(0), prompts(0, LENGTHS[:2])
    vocab = {chr(33 + i): i for i in range(96 - 2)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, template='')
    free = generate(model, texts, max_new_tokens=6, tokenizer=tokenizer)
    stop = free.text[0][2:4]
    for drafts in (0, 3):
      out = generate(
        model,
        texts,
        max_new_tokens=6,
        tokenizer=tokenizer,
        stop=[stop],
        num_speculative_tokens=drafts,
      )
      assert out.text[0] == free.text[0][: free.text[0].index(stop)]
      assert out.tokens[0] == free.tokens[0][: len(out.tokens[0])]
      assert len(out.tokens[0]) <= 4
      if stop not in free.text[1]:
        assert out.tokens[1] == free.tokens[1]

  @parameterized.parameters(
    (dict(prompts=[]), 'no prompt given'),
    (dict(prompts=[[]]), 'prompt 0 is empty'),
    (dict(prompts=[[1], [96]]), 'prompt 1 holds token id 96: ids are 0 to 95'),
    (dict(prompts=[[-1]]), 'token id -1'),
    (dict(max_new_tokens=0), 'max_new_tokens=0 must be at least 1'),
    (dict(max_new_tokens=2 * 10**6), 'exceeds the model window of'),
    (dict(prefill_chunk=0), 'prefill_chunk=0 must be at least 1'),
    (dict(stop=['x']), 'needs a tokenizer'),
    (dict(cache_dtype='int4'), "kv_cache_dtype='int4' must be"),
    (dict(top_p=2.0), 'top_p=2.0 must be'),
  )
  def test_bad_input_is_named(self, changes, message):
    args = dict(prompts=[[1, 2]], max_new_tokens=2)
    args = {**args, **changes}
    with self.assertRaisesRegex(ValueError, message):
      generate(small_model(0), args.pop('prompts'), **args)

  def test_cache_dtypes_run(self):
    model, texts = small_model(0), prompts(0, (20,))
    for dtype in ('bf16', 'fp8'):
      out = generate(model, texts, max_new_tokens=3, cache_dtype=dtype)
      assert len(out.tokens[0]) == 3


class WeightsTest(parameterized.TestCase):
  def test_fp8_weights_equal_their_dequantised_values(self):
    import tempfile

    config = small_config(0)
    model = make_model(config, 3)
    with tempfile.TemporaryDirectory() as directory:
      save_published(model, config, directory)
      fp8 = load_model(directory, weight_dtype='fp8')
      packed = pathlib.Path(directory) / 'packed'
      block = dataclasses.replace(config, weight_block_size=(128, 128))
      save_published(fp8, block, packed)
      wide = load_model(packed, dtype='f32', weight_dtype='f32')
    assert fp8.prologue[0].attention.q_b.kernel.dtype == jnp.float8_e4m3fn
    assert wide.prologue[0].attention.q_b.kernel.dtype == jnp.float32
    ids = prompts(0, (70,))[0]
    run = jax.jit(forward)
    ours, theirs = run(fp8, ids).logits, run(wide, ids).logits
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    exact = run(model, ids).logits
    assert np.abs(ours - exact).max() > 1e-3  # rounding was real


class LauncherTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    import tempfile

    super().setUpClass()
    cls._dir = tempfile.TemporaryDirectory()
    cls.directory = pathlib.Path(cls._dir.name) / 'model'
    config = small_config(0)
    save_published(small_model(0), config, cls.directory)
    cls.ids = pathlib.Path(cls._dir.name) / 'ids.json'
    cls.ids.write_text('[[1, 2, 3], [4, 5]]')

  @classmethod
  def tearDownClass(cls):
    cls._dir.cleanup()
    super().tearDownClass()

  def run_launcher(self, *flags):
    return subprocess.run(
      [sys.executable, 'launch/generate.py', *flags],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )

  def test_ids_in_json_out(self):
    out = pathlib.Path(self._dir.name) / 'out.json'
    done = self.run_launcher(
      f'--model={self.directory}',
      f'--prompt-ids={self.ids}',
      '--max-new-tokens=4',
      '--num_speculative_tokens=2',
      '--deterministic',
      '--dtype=f32',
      f'--json={out}',
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [len(t) for t in result['tokens']] == [4, 4]
    assert result['text'] is None
    assert 0 <= result['accept_length'] <= 2
    assert result['accept_length_with_bonus'] == result['accept_length'] + 1
    assert result['seconds_decode'] > 0
    assert json.loads(done.stdout.splitlines()[0]) == result['tokens'][0]
    want = generate(
      small_model(0),
      [[1, 2, 3], [4, 5]],
      max_new_tokens=4,
      num_speculative_tokens=2,
      plan=LocalPlan(row_tile=8),
    )
    assert result['tokens'] == want.tokens

  def test_bad_input_is_one_line_and_exit_code_2(self):
    folder = pathlib.Path(self._dir.name)
    (folder / 'broken.json').write_text('[1,')
    (folder / 'words.json').write_text('["a"]')
    model = f'--model={self.directory}'
    for flags, message in (
      ((), 'either --prompt=TEXT or --prompt_ids'),
      (('--model=zai-org/GLM-5.2',), 'hf download zai-org/GLM-5.2'),
      ((model,), 'either --prompt=TEXT or --prompt_ids'),
      ((model, '--prompt=hello'), 'has no tokenizer.json: use --prompt_ids'),
      ((model, f'--prompt_ids={folder}/no.json'), 'no.json'),
      ((model, f'--prompt_ids={folder}/broken.json'), 'is not JSON'),
      ((model, f'--prompt_ids={folder}/words.json'), 'list of integers'),
      ((model, f'--prompt_ids={self.ids}', '--chat'), '--chat needs --prompt'),
    ):
      done = self.run_launcher(*flags)
      assert done.returncode == 2, (flags, done.stderr)
      assert message in done.stderr
      assert done.stderr.count('\n') == 1, done.stderr
      assert done.stdout == ''
