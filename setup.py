"""Packaging of glm-jax: literals only, lower bounds only."""

from setuptools import setup

_TEST = [
  'pytest>=8',
  'pytest-xdist>=3.5',
  'ruff>=0.6',
  'pre-commit>=3.7',
]
_TORCH = ['torch>=2.6', 'transformers>=5.24']
_SERVE = [
  'aiohttp>=3.9',
  'fastapi>=0.115',
  'llguidance>=1.0',
  'prometheus-client>=0.20',
  'pydantic>=2.9',
  'uvicorn>=0.30',
]
_CLIENTS = ['openai>=1.60', 'schemathesis>=4.0']
_NOTEBOOK = ['matplotlib>=3.8']
_LIBTPU = ['libtpu>=0.0.42; platform_system == "Linux"']

setup(
  name='glm-jax',
  version='0.1.0',
  description=(
    'GLM-5.2 in JAX: shared-indexer sparse attention, MTP drafting and '
    'serving over a one-million-token window'
  ),
  license='Apache-2.0',
  python_requires='>=3.11',
  # Written out: `configs`, `launch` and `tests` are run by path and must
  # never be installed as top-level packages.
  packages=[
    'glm_jax',
    'glm_jax.benchmarks',
    'glm_jax.checkpoints',
    'glm_jax.data',
    'glm_jax.evaluation',
    'glm_jax.losses',
    'glm_jax.serving',
    'glm_jax.serving.benchmark',
    'glm_jax.serving.http',
    'glm_jax.serving.parsers',
    'glm_jax.training',
    'glm_jax.validation',
    'pallas_kernels',
    'pallas_kernels.grouped_matmul',
    'pallas_kernels.indexer_scores',
    'pallas_kernels.streaming_topk',
    'pallas_kernels.topk_gather_attention',
    'sharding',
    'sharding.planner',
  ],
  package_data={
    'glm_jax': ['*.jinja', 'models/glm_nano/*'],
    'glm_jax.serving.http': ['*.html'],
    'pallas_kernels': ['*.json'],
  },
  install_requires=[
    'absl-py>=2.1',
    'etils[epath]>=1.9',
    'flax>=0.12.6',
    'jax>=0.10.2',
    'jinja2>=3.1',
    'numpy>=2.0',
    'optax>=0.2.4',
    'orbax-checkpoint>=0.11.20',
    'safetensors>=0.5',
    'tokenizers>=0.20',
    'tqdm>=4.66',
  ],
  extras_require={
    'tpu': ['jax[tpu]>=0.10.2'],
    'gpu': ['jax[cuda13]>=0.10.2'],
    'plan': _LIBTPU,
    'serve': _SERVE,
    'validate': _TORCH,
    'notebook': _NOTEBOOK,
    'dev': _TEST + _SERVE + _CLIENTS + _TORCH + _NOTEBOOK + _LIBTPU,
  },
)
