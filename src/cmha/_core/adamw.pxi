# One optimiser step over many parameters, in place.

cdef extern from "dispatch.h" nogil:
    ctypedef struct cmha_adamw_part:
        float *p
        float *m
        float *v
        const float *g
        Py_ssize_t n
    void cmha_adamw(const cmha_adamw_part *parts, Py_ssize_t count, double lr, double beta1, double beta2, double eps,
                    double weight_decay, double correction1, double correction2, double grad_scale,
                    int threads) noexcept


cdef Array need_state(str name, object x, Array parameter, int place):
    """An array that a step writes: float32, of the parameter's shape, contiguous, on memory of the core."""
    if not isinstance(x, Array):
        raise TypeError(f"[adamw] {name}[{place}] must be an array; got {type(x).__name__}")
    cdef Array state = x
    if state.kind != FLOAT:
        raise TypeError(f"[adamw] {name}[{place}] must be float32; got {KIND_NAMES[state.kind]}")
    if not same_shape(state, parameter):
        raise ValueError(f"[adamw] {name}[{place}] must have its parameter's shape; "
                         f"got {name} {dims_tuple(state)}, params {dims_tuple(parameter)}")
    if name != "grads" and (state.storage.shared or not is_packed(state)):
        raise ValueError(f"[adamw] {name}[{place}] is written in place and must be contiguous memory of its own; "
                         f"got shape {dims_tuple(state)}, strides {state.strides}, shared {bool(state.storage.shared)}")
    return state


def adamw(list params, list m, list v, list grads, double lr, double beta1, double beta2, double eps,
          double weight_decay, step, double grad_scale=1.0):
    """Step number `step` (from 1) of every parameter with its m, v and gradient; nothing changes if one is refused."""
    cdef Py_ssize_t count = len(params), elements = 0, i
    cdef double correction1, correction2
    cdef cmha_adamw_part *parts
    cdef Array parameter, table
    cdef int threads
    if not count == len(m) == len(v) == len(grads):
        raise ValueError(f"[adamw] lists must be of equal length; "
                         f"got params {count}, m {len(m)}, v {len(v)}, grads {len(grads)}")
    if step < 1:
        raise ValueError(f"[adamw] steps count from 1; got {step}")
    table = new_vector(INT64, (count * sizeof(cmha_adamw_part) + 7) // 8)
    parts = <cmha_adamw_part *>table.data
    gradients = []                                              # all memory is there before the first write
    for i in range(count):
        if not isinstance(params[i], Array):
            raise TypeError(f"[adamw] params[{i}] must be an array; got {type(params[i]).__name__}")
        parameter = params[i]
        gradients.append(packed(need_state("grads", grads[i], parameter, i)))
        parts[i].p = floats(need_state("params", parameter, parameter, i))
        parts[i].m = floats(need_state("m", m[i], parameter, i))
        parts[i].v = floats(need_state("v", v[i], parameter, i))
        parts[i].g = floats(gradients[i])
        parts[i].n = parameter.length
        elements += parameter.length
    correction1, correction2 = 1.0 - beta1 ** <double>step, 1.0 - beta2 ** <double>step
    threads = gate(elements)
    with nogil:
        cmha_adamw(parts, count, lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale, threads)
    for written in (params, m, v):
        for parameter in written:
            parameter.bump()
