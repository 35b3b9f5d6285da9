/* AdamW and Adam of a record that lives on a CUDA device, in one pass over its memory.
 *
 * The bits are those of the CPU's kernels ([Note: the adamw step] and [Note: other recipes] in kernels.h):
 * each operation is an intrinsic that rounds once, to nearest, and is never contracted to an FMA, whatever the
 * compiler's options.  NVRTC compiles this file where it is needed (nvrtc.py).  It includes nothing, and is
 * plain C but for CUDA's words: a test compiles it for the CPU and compares every bit. */

/* As in kernels.h. */
struct infinity_adamw {
    float clip, decay, lerp_weight, beta2, grad_weight, denom_divisor, eps, step_factor;
    int lerp_from_grad;
    float l2;
};

enum { OF_ZEROS = 0, BF16 = 1, F32 = 2 }; /* what a gradient consists of */

__device__ static float canonical(float value) {
    return value != value ? __int_as_float(0x7FC00000) : value;
}

__device__ static float gradient_at(const void *grad, int kind, unsigned long long i) {
    if (kind == F32) return ((const float *)grad)[i];
    return kind == BF16 ? __int_as_float((int)((unsigned)((const unsigned short *)grad)[i] << 16)) : 0.0f;
}

/* Fields have n elements each.  lo: the lower half of a split master whose upper half is hi, in 16 bits; null
 * where hi is the fp32 master.  is_adam: weight decay is part of the gradient. */
#ifdef __cplusplus
extern "C"
#endif
__global__ void infinity_adamw_device(unsigned long long n, void *hi, short *lo, float *m, float *v,
                                      const void *grad, int kind, struct infinity_adamw s, int is_adam) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        float p = lo ? __int_as_float((int)(((unsigned)((unsigned short *)hi)[i] << 16) + (unsigned)lo[i]))
                     : ((float *)hi)[i];
        float g = __fmul_rn(gradient_at(grad, kind, i), s.clip);
        if (!is_adam) p = __fmul_rn(p, s.decay);
        else if (s.l2 != 0.0f) g = __fadd_rn(g, __fmul_rn(p, s.l2));
        const float old = m[i], change = __fmul_rn(__fsub_rn(g, old), s.lerp_weight);
        const float mean = __fadd_rn(s.lerp_from_grad ? g : old, change);
        const float square = __fadd_rn(__fmul_rn(v[i], s.beta2), __fmul_rn(__fmul_rn(g, s.grad_weight), g));
        const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(square), s.denom_divisor), s.eps);
        p = canonical(__fadd_rn(p, __fdiv_rn(__fmul_rn(mean, s.step_factor), denominator)));
        m[i] = canonical(mean);
        v[i] = canonical(square);
        if (!lo) {
            ((float *)hi)[i] = p;
            continue;
        }
        const unsigned bits = (unsigned)__float_as_int(p);
        ((unsigned short *)hi)[i] = (unsigned short)((bits + 0x8000u) >> 16);
        lo[i] = (short)(bits & 0xFFFFu);
    }
}
