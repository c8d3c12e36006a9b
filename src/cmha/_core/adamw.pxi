# One optimiser step over many parameters, in place.

cdef extern from "dispatch.h" nogil:
    void cmha_adamw(float *p, float *m, float *v, const float *g, Py_ssize_t n, double lr, double beta1, double beta2,
                    double eps, double weight_decay, double correction1, double correction2, double grad_scale,
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


def adamw(params, m, v, grads, double lr, double beta1, double beta2, double eps, double weight_decay, step,
          double grad_scale=1.0):
    """Step number `step` (from 1) of every parameter with its m, v and gradient; nothing changes if one is refused."""
    cdef Array parameter, first, second, gradient
    cdef double correction1, correction2
    cdef int threads, i
    if not len(params) == len(m) == len(v) == len(grads):
        raise ValueError(f"[adamw] lists must be of equal length; "
                         f"got params {len(params)}, m {len(m)}, v {len(v)}, grads {len(grads)}")
    if step < 1:
        raise ValueError(f"[adamw] steps count from 1; got {step}")
    for i in range(len(params)):
        if not isinstance(params[i], Array):
            raise TypeError(f"[adamw] params[{i}] must be an array; got {type(params[i]).__name__}")
        for name, arrays in (("params", params), ("m", m), ("v", v), ("grads", grads)):
            need_state(name, arrays[i], params[i], i)
    gradients = [packed(gradient) for gradient in grads]        # all memory is there before the first write
    correction1, correction2 = 1.0 - beta1 ** <double>step, 1.0 - beta2 ** <double>step
    for i in range(len(params)):
        parameter, first, second, gradient = params[i], m[i], v[i], gradients[i]
        threads = gate(parameter.length)
        with nogil:
            cmha_adamw(floats(parameter), floats(first), floats(second), floats(gradient), parameter.length, lr, beta1,
                       beta2, eps, weight_decay, correction1, correction2, grad_scale, threads)
        parameter.bump()
        first.bump()
        second.bump()
