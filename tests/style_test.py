"""The rules of the repository that a reader relies on."""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ('glm_jax', 'pallas_kernels', 'sharding')
SOURCES = sorted(
  path
  for folder in (*PACKAGES, 'configs', 'launch')
  for path in (ROOT / folder).rglob('*.py')
)
# Who may import whom among our own packages (design section 2).
ALLOWED = {
  'pallas_kernels': set(),
  'glm_jax': {'pallas_kernels'},
  'sharding': {'glm_jax', 'pallas_kernels'},
  'configs': {'glm_jax', 'sharding'},
  'launch': {'glm_jax', 'pallas_kernels', 'sharding'},
}


def imports(path):
  """Top-level names a file imports, at any depth of the file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name.split('.')[0], alias.name
    elif isinstance(node, ast.ImportFrom):
      yield (node.module or '').split('.')[0], node.module


def test_there_are_sources():
  assert len(SOURCES) > 25


@pytest.mark.parametrize('path', SOURCES, ids=lambda p: p.name)
def test_imports_run_one_way(path):
  package = path.relative_to(ROOT).parts[0]
  ours = {name for name, _ in imports(path)} & set(ALLOWED)
  assert ours - {package} <= ALLOWED[package]


def test_kernels_import_jax_only():
  for path in (ROOT / 'pallas_kernels').rglob('*.py'):
    third = {name for name, _ in imports(path)}
    assert third - sys.stdlib_module_names <= {
      'jax',
      'jaxlib',
      'pallas_kernels',
    }, path


def test_no_environment_variable_changes_semantics():
  for path in SOURCES:
    text = path.read_text()
    assert not re.search(r'os\.(environ|getenv)', text), path


def test_packages_are_listed_and_generic_folders_are_not():
  text = (ROOT / 'setup.py').read_text()
  listed = set(re.findall(r"^    '([a-z_.0-9]+)',$", text, re.M))
  on_disk = {
    '.'.join(path.parent.relative_to(ROOT).parts)
    for folder in PACKAGES
    for path in (ROOT / folder).rglob('__init__.py')
  }
  assert on_disk <= listed
  for folder in ('configs', 'launch', 'tests'):
    assert folder not in listed
    assert not (ROOT / folder / '__init__.py').exists()


@pytest.mark.parametrize('path', SOURCES, ids=lambda p: p.name)
def test_files_and_functions_stay_short(path):
  text = path.read_text()
  assert text.count('\n') <= 450, 'aim: 400 lines'
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef):
      body = [n for n in node.body if not _is_docstring(n)]
      first = body[0].lineno if body else node.lineno
      assert node.end_lineno - first < 75, f'{node.name}: aim for 60 lines'


def _is_docstring(node):
  return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_no_unfinished_marks():
  for path in SOURCES:
    assert not re.search(r'\b(TODO|FIXME|XXX)\b', path.read_text()), path
