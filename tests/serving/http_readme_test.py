"""What the README tells people to type is answered."""

import json
import pathlib
import subprocess

README = pathlib.Path(__file__).resolve().parents[2] / 'README.md'


def test_the_curl_lines_of_the_readme(server, engine):
  section = README.read_text().split('## Serving')[1]
  lines = [t for t in section.splitlines() if not t or t.startswith('    ')]
  code = '\n'.join(lines)
  commands = [c for c in code.split('\n\n') if c.strip().startswith('curl')]
  assert len(commands) == 3
  engine.answer = 'hm</think>Hello'
  answers = []
  for command in commands:
    command = command.replace('http://127.0.0.1:8000', server.url)
    command = command.strip().replace('curl', 'curl -sS', 1)
    done = subprocess.run(
      ['bash', '-c', command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answers.append(done.stdout)
  assert json.loads(answers[0])['choices'][0]['message']['content'] == 'Hello'
  assert answers[1].startswith('data: ') and 'completion_tokens' in answers[1]
  person = json.loads(answers[2])['choices'][0]['message']['content']
  assert set(json.loads(person)) == {'name', 'age'}
