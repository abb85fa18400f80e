"""MegaJAX rebuilds Megatron-LM on JAX/XLA: one training step, every parallel layout.

Start reading at `megajax.train`. The names below are what notebooks and scripts need; each is imported when it is first
used, so that `import megajax` costs nothing. Commands keep their modules: `from megajax.train import train`, `from
megajax.planning import plan`.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "megajax.config": (
        "Config", "DataConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "TrainConfig", "InputError",
        "load_config", "resolve_mesh",
    ),
    "megajax.parallel.mesh": ("build_mesh", "compile_fast", "simulate_devices"),
    "megajax.parallel.rules": ("RULES", "Rule", "Rules"),
    "megajax.parallel.run": ("Runner",),
    "megajax.parallel.pipeline.schedule": ("Interleaved1F1B", "gpipe", "interleaved", "one_f_one_b"),
    "megajax.training.schedule": ("Schedule",),
    "megajax.training.batches": ("Feed", "batch_shardings"),
    "megajax.training.step": ("build_init", "build_train_step", "weighted"),
    "megajax.costs.flops": ("count_flops",),
    "megajax.costs.hardware": ("gpu_named",),
    "megajax.planning.collectives": ("Collective", "Traffic", "collectives"),
    "megajax.planning.drawing": ("draw_svg", "draw_text"),
    "megajax.planning.equivalence": ("compare", "compile_layout", "one_device", "random_batch", "train_layout"),
    "megajax.planning.roofline": ("step_time",),
    "megajax.inference.sampling": ("Sampling",),
    "megajax.interop.hf.transfer": ("export_model", "import_model"),
    "megajax.generate": ("generate_text",),
    "megajax.show": ("sharding_of",),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list, in the table above


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megajax' has no public name {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, so that they complete in a notebook."""
    return [*globals(), *__all__]
