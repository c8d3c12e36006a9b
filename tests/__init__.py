"""The tests. What the ids in their docstrings stand for:

N numeric bounds (element by element, against float64)   G gradients   D the same bits   M memory safety
P processes, threads and signals   F files   B a fault that users of other libraries really met, here as a test
"""
