"""CPU kernels in C++, called through XLA FFI."""
