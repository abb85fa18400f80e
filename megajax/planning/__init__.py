"""Costs of a model on given hardware, computed without running it: `plan(config, gpu="h100", gpus=128)`."""

from megajax.planning.plan import Plan, plan

__all__ = ["Plan", "plan"]
