"""Kernels for SM100 in CuTe DSL. Nothing here imports cutlass before a submodule is imported."""
