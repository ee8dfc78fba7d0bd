"""`launch/pod.sh` and the GKE manifest, as far as they run without a pod."""

import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile

import pytest
import yaml
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / 'launch' / 'pod.sh'
MANIFEST = ROOT / 'launch' / 'gke' / 'jobset.yaml'


def pod(*args):
  return subprocess.run(
    ['bash', SCRIPT, *args], capture_output=True, text=True, timeout=60
  )


class PodTest(parameterized.TestCase):
  def test_syntax(self):
    done = subprocess.run(
      ['bash', '-n', SCRIPT], capture_output=True, text=True
    )
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertTrue(SCRIPT.stat().st_mode & 0o111)

  def test_shellcheck(self):
    if shutil.which('shellcheck') is None:
      pytest.skip('shellcheck is not installed')
    done = subprocess.run(
      ['shellcheck', '-x', SCRIPT], capture_output=True, text=True
    )
    self.assertEqual(done.stdout, '')

  def test_same_command_on_every_host(self):
    done = pod(
      '--tpu=slice', '--zone=us-x1-a', '--project=p', '--dry-run', '--',
      'launch/serve.py', '--model=gs://b/m', "--served-name=it's $HOME",
    )  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stderr)
    words = shlex.split(done.stdout)
    self.assertEqual(
      words[:-1],
      ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'slice',
       '--zone=us-x1-a', '--worker=all', '--project=p'],
    )  # fmt: skip
    # What the shell on a host makes of it.
    remote = words[-1].removeprefix('--command=')
    folder, command = remote.split(' && exec ')
    self.assertStartsWith(folder, 'cd glm-jax && echo $$ > ')
    echoed = subprocess.run(
      ['bash', '-c', f'printf "%s\\n" {command}'],
      capture_output=True,
      text=True,
    )
    self.assertEqual(
      echoed.stdout.splitlines(),
      ['.venv/bin/python', 'launch/serve.py', '--model=gs://b/m',
       "--served-name=it's $HOME", '--coordinator_address=auto'],
    )  # fmt: skip

  @parameterized.parameters(
    ((), '--tpu=NAME is needed'),
    (('--tpu=a',), '--zone=ZONE is needed'),
    (('--tpu=a', '--zone=b'), 'give a launcher'),
    (('--tpu=a', '--zone=b', '--', 'serve'), "'serve' is no launcher"),
    (('--tpu=a', 'launch/serve.py'), "unknown argument 'launch/serve.py'"),
  )
  def test_bad_input_is_one_line(self, args, message):
    done = pod(*args)
    self.assertEqual(done.returncode, 2)
    self.assertEqual(done.stdout, '')
    self.assertEqual(done.stderr.count('\n'), 1)
    self.assertIn(message, done.stderr)

  def test_help(self):
    done = pod('--help')
    self.assertEqual(done.returncode, 0)
    self.assertIn('launch/pod.sh --tpu=NAME', done.stdout)
    self.assertNotIn('set -euo', done.stdout)

  def test_the_status_is_that_of_the_hosts(self):
    """gcloud is replaced by a script that fails as a lost worker does."""
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    fake = pathlib.Path(folder.name) / 'gcloud'
    fake.write_text(
      '#!/bin/sh\necho "[1] process 0 of 2 is lost" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
      ['bash', SCRIPT, '--tpu=a', '--zone=b', '--', 'launch/serve.py'],
      capture_output=True,
      text=True,
      env={'PATH': f'{folder.name}:/usr/bin:/bin'},
      timeout=60,
    )
    self.assertEqual(done.returncode, 1)
    self.assertEqual(done.stderr, '[1] process 0 of 2 is lost\n')


class ManifestTest(absltest.TestCase):
  def test_manifest(self):
    job = yaml.safe_load(MANIFEST.read_text())
    self.assertEqual((job['apiVersion'], job['kind']),
                     ('jobset.x-k8s.io/v1alpha2', 'JobSet'))  # fmt: skip
    (slice_,) = job['spec']['replicatedJobs']
    spec = slice_['template']['spec']
    self.assertEqual(spec['parallelism'], spec['completions'])
    pod_spec = spec['template']['spec']
    (container,) = pod_spec['containers']
    limits = container['resources']['limits']
    self.assertEqual(container['resources']['requests'], limits)
    # Hosts times chips of a host are the chips of the topology.
    topology = pod_spec['nodeSelector']['cloud.google.com/gke-tpu-topology']
    chips = 1
    for side in topology.split('x'):
      chips *= int(side)
    self.assertEqual(spec['parallelism'] * limits['google.com/tpu'], chips)
    self.assertEqual(pod_spec['restartPolicy'], 'Never')
    (command,) = container['args']
    self.assertIn('--coordinator_address=auto', command)
    mounts = {m['name'] for m in container['volumeMounts']}
    self.assertEqual(mounts, {v['name'] for v in pod_spec['volumes']})

  def test_comment_names_files_that_exist(self):
    for path in re.findall(
      r'launch/\S+?\.(?:py|sh|yaml)', MANIFEST.read_text()
    ):
      if path != 'launch/serve.py':
        self.assertTrue((ROOT / path).exists(), path)


if __name__ == '__main__':
  absltest.main()
