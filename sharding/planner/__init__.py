"""The pod planner: real steps compiled for slices of TPUs, without a TPU."""

from sharding.planner.plan import PodPlan
from sharding.planner.process import CompileError
from sharding.planner.request import CACHE_PLANS, STEPS, PlanRequest
from sharding.planner.search import compare_plans, plan_pod

__all__ = [
  'CACHE_PLANS',
  'STEPS',
  'CompileError',
  'PlanRequest',
  'PodPlan',
  'compare_plans',
  'plan_pod',
]
