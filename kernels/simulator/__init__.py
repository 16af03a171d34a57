"""A strict simulator of sm_100a: runs compiled CuTe DSL functions on CPU tensors in place, without a GPU or driver."""
