"""Numba as a compiler of kernels.

    processes.py     what child processes need
    target.py        which processor is compiled for, and what it can do
    simd.py          vectors and small tiles of vectors as Numba values
    memory.py        scalars at addresses, atomics
    arguments.py     argument blocks: fields read by name inside kernels
    piece.py         what a block format tells the matrix kernels
    kernel.py        `@kernel`: a builder of one compiled function, found by name and parameters
    machine_code.py  from a typed Python function to position-independent machine code
    store.py         machine code on disk and in memory; the only file here that a warm start needs

A kernel is a function `(arguments, worker, workers)` of an address and two numbers. Importing this package imports nothing.
"""
