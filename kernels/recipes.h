/* The steps of [Note: other recipes] and [Note: the small step], once per instruction set:
 * recipes_*.c define f32s, a register of LANES fp32, and its operations, and include this file.
 * Operators on f32s round each operation by itself, as on a float. */

/* Prefetches later elements of a field: [Note: fetching ahead].  One element at a time is too slow to
 * need it. */
LANES_FUNCTION void look_ahead(const void *address, size_t width) {
    if (LANES > 1)
        __builtin_prefetch((const char *)((uintptr_t)address + FETCH_NUMEL * width), 0, 2);
}

LANES_FUNCTION f32s next_f32s(const float *address) {
    look_ahead(address, sizeof *address);
    return load_f32s(address);
}

LANES_FUNCTION f32s next_split(const uint16_t *hi, const int16_t *lo) {
    look_ahead(hi, sizeof *hi);
    look_ahead(lo, sizeof *lo);
    return load_split(hi, lo);
}

/* The gradients of elements i to i + LANES - 1. */
LANES_FUNCTION f32s load_grad(const void *grad, size_t i, int32_t type) {
    look_ahead(grad_at(grad, i, type), type == INFINITY_F32 ? sizeof(float) : sizeof(uint16_t));
    if (type == INFINITY_BF16) return load_bf16s((const uint16_t *)grad + i);
    if (type == INFINITY_F16) return load_f16s((const uint16_t *)grad + i);
    return load_f32s((const float *)grad + i);
}

/* Updates Adam's two moments; returns what is added to the weight. */
LANES_FUNCTION f32s adam_move(float *m_address, float *v_address, f32s g,
                              const struct infinity_adamw *s) {
    f32s m = next_f32s(m_address), v = next_f32s(v_address);
    f32s change = (g - m) * all(s->lerp_weight);
    m = (s->lerp_from_grad ? g : m) + change;
    v = v * all(s->beta2);
    v = v + (all(s->grad_weight) * g) * g;
    f32s denom = roots(v) / all(s->denom_divisor) + all(s->eps);
    store_f32s(m_address, m);
    store_f32s(v_address, v);
    return (all(s->step_factor) * m) / denom;
}

LANES_FUNCTION size_t adamw_half_loop(size_t n, uint16_t *weight, float *master, float *m, float *v,
                                      const void *grad, bool around, int32_t type,
                                      const struct infinity_adamw *s) {
    const struct infinity_adamw own = *s; /* a copy, which no store below can alias */
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s g = load_grad(grad, i, type) * all(own.clip);
        f32s p = next_f32s(master + i) * all(own.decay);
        p = p + adam_move(m + i, v + i, g, &own);
        store_f32s(master + i, p);
        if (around) {
            stream_f16s(weight + i, p);
        } else {
            look_ahead(weight + i, sizeof *weight); /* writing a part of a line reads the line first */
            store_f16s(weight + i, p);
        }
    }
    if (around) end_streams();
    return i;
}

LANES_FUNCTION size_t adamw_full_loop(size_t n, float *weight, float *m, float *v, const void *grad,
                                      int32_t type, const struct infinity_adamw *s) {
    const struct infinity_adamw own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s g = load_grad(grad, i, type) * all(own.clip);
        f32s p = next_f32s(weight + i) * all(own.decay);
        store_f32s(weight + i, p + adam_move(m + i, v + i, g, &own));
    }
    return i;
}

LANES_FUNCTION size_t adam_loop(size_t n, uint16_t *hi, int16_t *lo, float *m, float *v,
                                const void *grad, int32_t type, const struct infinity_adamw *s) {
    const struct infinity_adamw own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s p = next_split(hi + i, lo + i);
        f32s g = load_grad(grad, i, type) * all(own.clip);
        if (own.l2 != 0.0f) g = g + all(own.l2) * p;
        store_split(hi + i, lo + i, p + adam_move(m + i, v + i, g, &own));
    }
    return i;
}

LANES_FUNCTION size_t adamw_small_loop(size_t n, uint16_t *hi, int16_t *lo, float *m_address,
                                       float *v_address, const void *grad, int32_t type,
                                       const struct infinity_adamw_small *s) {
    const struct infinity_adamw_small own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s g = load_grad(grad, i, type), t = g * all(own.root_weight);
        f32s m = fused(load_f32s(m_address + i), all(own.beta1), g * all(own.grad_weight));
        f32s v = fused(t, t, load_f32s(v_address + i) * all(own.beta2));
        f32s move = (all(own.step_factor) * m) / (roots(v) + all(own.eps));
        store_f32s(m_address + i, m);
        store_f32s(v_address + i, v);
        store_split(hi + i, lo + i, fused(next_split(hi + i, lo + i), all(own.decay), move));
    }
    return i;
}

LANES_FUNCTION size_t sgd_loop(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                               int32_t type, const struct infinity_sgd *s) {
    const struct infinity_sgd own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s p = next_split(hi + i, lo + i);
        f32s g = load_grad(grad, i, type) * all(own.clip);
        if (own.l2 != 0.0f) g = g + all(own.l2) * p;
        f32s moved = g;
        if (!own.is_first)
            moved = next_f32s(m + i) * all(own.momentum) + all(own.grad_weight) * g;
        store_f32s(m + i, moved);
        if (own.is_nesterov) moved = g + all(own.momentum) * moved;
        store_split(hi + i, lo + i, p + all(own.step_factor) * moved);
    }
    return i;
}

LANES_FUNCTION size_t adagrad_loop(size_t n, uint16_t *hi, int16_t *lo, float *v, const void *grad,
                                   int32_t type, const struct infinity_adagrad *s) {
    const struct infinity_adagrad own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s p = next_split(hi + i, lo + i);
        f32s g = load_grad(grad, i, type) * all(own.clip);
        if (own.l2 != 0.0f) g = g + all(own.l2) * p;
        f32s sum = next_f32s(v + i) + g * g;
        store_f32s(v + i, sum);
        f32s move = (all(own.step_factor) * g) / (roots(sum) + all(own.eps));
        store_split(hi + i, lo + i, p + move);
    }
    return i;
}

LANES_FUNCTION size_t lion_loop(size_t n, uint16_t *hi, int16_t *lo, float *m, const void *grad,
                                int32_t type, const struct infinity_lion *s) {
    const struct infinity_lion own = *s;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32s p = next_split(hi + i, lo + i) * all(own.decay), moved = next_f32s(m + i);
        f32s g = load_grad(grad, i, type) * all(own.clip);
        f32s direction = moved * all(own.beta1) + all(own.grad_weight1) * g;
        store_f32s(m + i, moved * all(own.beta2) + all(own.grad_weight2) * g);
        store_split(hi + i, lo + i, p + all(own.step_factor) * signs(direction));
    }
    return i;
}

/* fp16 -> fp32, exactly, and back, to nearest, ties to even. */
TARGET void KERNEL(widen_half)(size_t n, const uint16_t *restrict f16, float *restrict f32) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) store_f32s(f32 + i, load_f16s(f16 + i));
    REST(widen_half, f16 + i, f32 + i);
}

TARGET void KERNEL(narrow_half)(size_t n, const float *restrict f32, uint16_t *restrict f16) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) store_f16s(f16 + i, load_f32s(f32 + i));
    REST(narrow_half, f32 + i, f16 + i);
}

TARGET void KERNEL(accumulate_half)(size_t n, float *restrict acc, const uint16_t *restrict grad) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32s(acc + i, load_f32s(acc + i) + load_f16s(grad + i));
    REST(accumulate_half, acc + i, grad + i);
}

/* loop(..., type, s) with a constant type, for the compiler; leaves a rest that fills no register. */
#define BY_TYPE(loop, type, ...) \
    (type == INFINITY_BF16  ? loop(__VA_ARGS__, INFINITY_BF16, s) \
     : type == INFINITY_F16 ? loop(__VA_ARGS__, INFINITY_F16, s) \
                            : loop(__VA_ARGS__, INFINITY_F32, s))

TARGET void KERNEL(adamw_half)(size_t n, uint16_t *restrict weight, float *restrict master,
                               float *restrict m, float *restrict v, const void *restrict grad,
                               int32_t type, const struct infinity_adamw *s, bool around) {
    size_t i = around && streams_to(weight)
                   ? BY_TYPE(adamw_half_loop, type, n, weight, master, m, v, grad, true)
                   : BY_TYPE(adamw_half_loop, type, n, weight, master, m, v, grad, false);
    REST(adamw_half, weight + i, master + i, m + i, v + i, grad_at(grad, i, type), type, s, false);
}

TARGET void KERNEL(adamw_full)(size_t n, float *restrict weight, float *restrict m,
                               float *restrict v, const void *restrict grad, int32_t type,
                               const struct infinity_adamw *s) {
    size_t i = BY_TYPE(adamw_full_loop, type, n, weight, m, v, grad);
    LEFT_OVER(adamw_full, weight + i, m + i, v + i, grad_at(grad, i, type));
}

TARGET void KERNEL(adam)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                         float *restrict v, const void *restrict grad, int32_t type,
                         const struct infinity_adamw *s) {
    size_t i = BY_TYPE(adam_loop, type, n, hi, lo, m, v, grad);
    LEFT_OVER(adam, hi + i, lo + i, m + i, v + i, grad_at(grad, i, type));
}

TARGET void KERNEL(adamw_small)(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                                float *restrict m, float *restrict v, const void *restrict grad,
                                int32_t type, const struct infinity_adamw_small *s) {
    size_t i = BY_TYPE(adamw_small_loop, type, n, hi, lo, m, v, grad);
    LEFT_OVER(adamw_small, hi + i, lo + i, m + i, v + i, grad_at(grad, i, type));
}

TARGET void KERNEL(sgd)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                        const void *restrict grad, int32_t type, const struct infinity_sgd *s) {
    size_t i = BY_TYPE(sgd_loop, type, n, hi, lo, m, grad);
    LEFT_OVER(sgd, hi + i, lo + i, m + i, grad_at(grad, i, type));
}

TARGET void KERNEL(adagrad)(size_t n, uint16_t *restrict hi, int16_t *restrict lo,
                            float *restrict v, const void *restrict grad, int32_t type,
                            const struct infinity_adagrad *s) {
    size_t i = BY_TYPE(adagrad_loop, type, n, hi, lo, v, grad);
    LEFT_OVER(adagrad, hi + i, lo + i, v + i, grad_at(grad, i, type));
}

TARGET void KERNEL(lion)(size_t n, uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                         const void *restrict grad, int32_t type, const struct infinity_lion *s) {
    size_t i = BY_TYPE(lion_loop, type, n, hi, lo, m, grad);
    LEFT_OVER(lion, hi + i, lo + i, m + i, grad_at(grad, i, type));
}
