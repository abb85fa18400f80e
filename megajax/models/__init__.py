"""Maths of transformers as Flax NNX modules, without meshes, jit or files; dimensions have logical names."""
