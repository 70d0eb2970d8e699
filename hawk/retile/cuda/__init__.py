"""Retile on a GPU: kernels generated from programs, the tables that they read, and their launch through CuPy.

`box` lays the work of one block of threads out, `moves` and `source` write it as CUDA C, `tables` binds it to pieces,
`launch` compiles and starts it.  All but `launch` works without a GPU, and what they write also runs on a CPU under
a header of a few lines, which is how the tests hold it to the other cores.
"""
