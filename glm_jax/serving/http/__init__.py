"""The OpenAI-compatible HTTP interface of a serving engine."""

from glm_jax.serving.http.app import create_app
from glm_jax.serving.http.server import Server
from glm_jax.serving.http.service import ServedModel, ServerOptions

__all__ = ['ServedModel', 'Server', 'ServerOptions', 'create_app']
