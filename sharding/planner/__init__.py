"""The pod planner: real steps compiled for slices of TPUs, without a TPU."""
