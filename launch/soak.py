r"""Hours of misuse in minutes: a server, chaotic clients, and the books after.

  python launch/soak.py --requests=2000
  python launch/soak.py --url=http://127.0.0.1:8000 --vocab_size=151552

Starts launch/serve.py with a small random model (or takes a running server),
asks some requests alone for the right answers, then lets clients arrive at
random that stream, stall, leave, abort, or send nonsense. Afterwards nothing
may be held: every page is free or idle, no request is inside, and every
answer that was finished is the right one. At last SIGTERM comes in the
middle of a second wave: what runs ends well, and the exit code is 0.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import flags

from glm_jax import cli

_REQUESTS = flags.DEFINE_integer('requests', 300, 'Requests of the first wave.')
_PER_SECOND = flags.DEFINE_float('per_second', 20.0, 'Mean arrivals.')
_URL = flags.DEFINE_string(
  'url', None, 'A server that runs already; it is not told to end.'
)
_VOCAB = flags.DEFINE_integer('vocab_size', 512, 'Token ids are below it.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the traffic.')
_START = flags.DEFINE_float(
  'start_timeout', 1200.0, 'Seconds that the server may take to start.'
)
_JSON = flags.DEFINE_string('json', None, 'Write the result to this file.')

_MAX_BODY = 100_000
_MAX_LEN = 512
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Few pages and a short queue: requests wait, are evicted and are refused.
_SERVER = (
  '--model=tiny',
  '--load_format=dummy',
  '--dtype=f32',
  '--deterministic',
  f'--max_model_len={_MAX_LEN}',
  '--num_gpu_blocks_override=24',
  '--kv_offloading_size=0.02',
  '--max_num_seqs=4',
  '--max_num_batched_tokens=32',
  '--num_speculative_tokens=3',
  '--max_waiting_requests=24',
  f'--max_body_bytes={_MAX_BODY}',
  '--shutdown_timeout=120',
  '--port=0',
)


def start(folder: pathlib.Path) -> tuple[subprocess.Popen, str]:
  """A server of its own: (process, URL)."""
  ready = folder / 'ready.json'
  command = [sys.executable, str(_ROOT / 'launch' / 'serve.py'), *_SERVER]
  process = subprocess.Popen([*command, f'--json={ready}'], cwd=_ROOT)
  end = time.monotonic() + _START.value
  while not ready.exists():
    if process.poll() is not None:
      raise RuntimeError(f'the server ended with code {process.returncode}')
    if time.monotonic() > end:
      process.kill()
      raise RuntimeError(f'no server after {_START.value} s')
    time.sleep(0.2)
  return process, json.loads(ready.read_text())['url']


async def status(url: str) -> dict:
  """The counts of the status page."""
  import aiohttp

  async with aiohttp.ClientSession() as http:
    async with http.get(f'{url}/status') as answer:
      return await answer.json()


async def leaks(url: str) -> list[str]:
  """What is still held once all clients have gone."""
  for _ in range(200):
    counts = await status(url)
    engine, pages = counts['engine'], counts['engine']['pages']
    inside = counts['requests']['open'] + engine['requests']['running']
    inside += engine['requests']['waiting']
    if not inside and not pages['used']:
      break
    await asyncio.sleep(0.1)
  found = []
  if inside:
    found.append(f'{inside} requests are still inside')
  if pages['used']:
    found.append(f'{pages["used"]} pages are still used')
  if pages['idle'] + pages['free'] != pages['total']:
    found.append(f'pages are lost: {pages}')
  return found


async def waves(url: str, process: subprocess.Popen | None) -> dict:
  """Both waves; what they found."""
  from glm_jax.serving.benchmark import chaos

  asks = chaos.make_asks(24, _VOCAB.value, 200, seed=_SEED.value)
  cli.log('asking for the right answers')
  answers = await chaos.alone(url, asks)
  make = lambda seed: chaos.Chaos(
    url,
    answers,
    max_body_bytes=_MAX_BODY,
    max_model_len=_MAX_LEN,
    per_second=_PER_SECOND.value,
    seed=seed,
  )
  first = make(_SEED.value)
  cli.log(f'{_REQUESTS.value} requests')
  begin = time.perf_counter()
  await first.run(_REQUESTS.value)
  seconds = time.perf_counter() - begin
  found = {
    'requests': _REQUESTS.value,
    'seconds': seconds,
    'finished': first.outcome.finished,
    'statuses': {
      f'{kind}: {code}': count
      for (kind, code), count in sorted(first.outcome.statuses.items())
    },
    'problems': first.outcome.problems + await leaks(url),
    'counts': await status(url),
  }
  if process is not None:
    cli.log('SIGTERM in the middle of a second wave')
    second = make(_SEED.value + 1)
    work = asyncio.create_task(second.run(max(20, _REQUESTS.value // 10)))
    await asyncio.sleep(3 / _PER_SECOND.value + 0.5)
    second.leaving = True
    process.send_signal(signal.SIGTERM)
    await work
    found['problems'] += second.outcome.problems
    found['exit_code'] = await asyncio.to_thread(process.wait, 180)
    if found['exit_code'] != 0:
      found['problems'].append(f'exit code {found["exit_code"]}')
  return found


def main() -> bool:
  if _REQUESTS.value < 1 or not np.isfinite(_PER_SECOND.value):
    raise cli.UserError('--requests and --per_second must be above 0')
  with tempfile.TemporaryDirectory() as folder:
    process, url = None, _URL.value
    if url is None:
      process, url = start(pathlib.Path(folder))
    try:
      found = asyncio.run(waves(url.rstrip('/'), process))
    finally:
      if process is not None and process.poll() is None:
        process.kill()
  for kind, count in found['statuses'].items():
    print(f'{kind:<36}{count}')
  print(
    f'{found["requests"]} requests in {found["seconds"]:.0f} s, '
    f'{found["finished"]} answers compared, '
    f'{len(found["problems"])} problems'
  )
  for problem in found['problems']:
    print(f'  {problem}')
  if _JSON.value:
    cli.write_json(_JSON.value, cli.origin() | found)
  return not found['problems']


if __name__ == '__main__':
  cli.run(main)
