"""The maths of a transformer as Flax NNX modules: no mesh, no jit, no files; dimensions go by their logical names."""
