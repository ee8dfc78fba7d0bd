"""What tests ask a benchmark suite for."""

from glm_jax.benchmarks import Device, Request


def suite_request(**changes):
  device = Device('cpu', float('inf'), float('inf'))
  values = dict(evidence='run', devices=(device,), command='c', date='d')
  return Request(**{**values, **changes})
