"""How each side computes a row: one module per library, OPS[name](data, sizes) -> run, or (run, check).

run() does the work once and returns its results; check() does it for comparison and may return more (default: run). A
result is an array, or a list of arrays that are compared as one. Nothing else in bench/ imports these libraries.
"""
