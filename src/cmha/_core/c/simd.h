/*
One virtual vector of 16 floats, v16, and one mask of 16 lanes, m16: the only file that names instructions.

    AVX-512   one register and one mask register
    AVX2+FMA  two registers
    NEON      four registers (aarch64)
    plain C   an array; fma emulated exactly, so the bits are those of the other paths (slow)

Every function means the same on every path, bit for bit: v_max(a, b) is `a > b ? a : b` (b when either is NaN),
v_sum adds lane i to lane i + 8, then 4, 2, 1; v_fma rounds once. Tails: v_load_n reads only n floats and fills with 0.
*/
#ifndef CMHA_SIMD_H
#define CMHA_SIMD_H

#include "compiler.h"
#include <math.h>
#include <string.h>
#ifdef CMHA_NEON
#include <arm_neon.h>
#endif


/* a * b + c rounded once. Without an instruction: the product is exact in double, the sum is rounded to odd (so that the
   last bit remembers what was lost), and the cast to float is then the only rounding. Boldo & Melquiond 2008. */
INLINE float f_fma(float a, float b, float c) {
#if defined(_MSC_VER) && (defined(CMHA_AVX2) || defined(CMHA_AVX512))
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
#elif defined(_MSC_VER) && defined(CMHA_NEON)
    return vget_lane_f32(vfma_f32(vdup_n_f32(c), vdup_n_f32(a), vdup_n_f32(b)), 0);
#elif defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double p = (double)a * (double)b, x = (double)c, s = p + x;
    double t = s - p, lost = (p - (s - t)) + (x - t);
    uint64_t bits;
    memcpy(&bits, &s, 8);
    if (lost != 0 && !(bits & 1) && (bits & 0x7ff0000000000000u) != 0x7ff0000000000000u)
        bits += (lost > 0) == (s > 0) ? 1 : (uint64_t)-1;
    memcpy(&s, &bits, 8);
    return (float)s;
#endif
}

INLINE uint32_t f_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float f_from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

#if defined(CMHA_AVX512) /* ------------------------------------------------------------------------ AVX-512 */
#ifdef CMHA_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
INLINE __m512 emulated_load(__mmask16 m, const float *p) { /* what simde 0.7 lacks */
    float t[16] = {0};
    for (int i = 0; i < 16; i++) if (m >> i & 1) t[i] = p[i];
    return _mm512_loadu_ps(t);
}
INLINE void emulated_store(float *p, __mmask16 m, __m512 a) {
    float t[16];
    _mm512_storeu_ps(t, a);
    for (int i = 0; i < 16; i++) if (m >> i & 1) p[i] = t[i];
}
INLINE __m256 emulated_high(__m512 a) { float t[16]; _mm512_storeu_ps(t, a); return _mm256_loadu_ps(t + 8); }
#define _mm512_extractf32x8_ps(a, half) emulated_high(a)
#define _mm512_maskz_loadu_ps emulated_load
#define _mm512_mask_storeu_ps emulated_store
#else
#include <immintrin.h>
#endif
#define V_TILE_ROWS 8 /* rows and vectors of the matmul tile: 8 x 3 accumulators + 3 of B + 1 broadcast fit 32 registers */
#define V_TILE_VECTORS 3
typedef __m512 v16;
typedef __mmask16 m16;
INLINE v16 v_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
INLINE m16 m_first(int n) { return (m16)(n >= 16 ? 0xffff : (1u << n) - 1); }
INLINE v16 v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(m_first(n), p); }
INLINE void v_store_n(float *p, v16 a, int n) { _mm512_mask_storeu_ps(p, m_first(n), a); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_sqrt(v16 a) { return _mm512_sqrt_ps(a); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE v16 v_select(m16 m, v16 a, v16 b) { return _mm512_mask_blend_ps(m, b, a); }
INLINE m16 v_lt(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE m16 v_le(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE m16 v_eq(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE m16 m_and(m16 a, m16 b) { return (m16)(a & b); }
INLINE unsigned m_bits(m16 m) { return m; }
INLINE m16 m_from_bits(unsigned bits) { return (m16)bits; }
#define V_AS_INT(a) _mm512_castps_si512(a)
#define V_AS_FLOAT(a) _mm512_castsi512_ps(a)
INLINE v16 v_and_bits(v16 a, uint32_t u) { return V_AS_FLOAT(_mm512_and_si512(V_AS_INT(a), _mm512_set1_epi32((int)u))); }
INLINE v16 v_or_bits(v16 a, uint32_t u) { return V_AS_FLOAT(_mm512_or_si512(V_AS_INT(a), _mm512_set1_epi32((int)u))); }
INLINE v16 v_from_exponent(v16 a) { return V_AS_FLOAT(_mm512_srli_epi32(V_AS_INT(a), 23)); }
INLINE v16 v_to_exponent(v16 a) { return V_AS_FLOAT(_mm512_slli_epi32(V_AS_INT(a), 23)); }
INLINE v16 v_copy_sign(v16 a, v16 sign) {
    __m512i bit = _mm512_set1_epi32(INT32_MIN);
    return V_AS_FLOAT(_mm512_or_si512(_mm512_andnot_si512(bit, V_AS_INT(a)), _mm512_and_si512(bit, V_AS_INT(sign))));
}

#elif defined(CMHA_AVX2) /* --------------------------------------------------------------------------- AVX2 */
#include <immintrin.h>
#define V_TILE_ROWS 6 /* 6 x 1 virtual vectors are 12 registers; 2 of B and 1 broadcast make 15 of 16 */
#define V_TILE_VECTORS 1
typedef struct { __m256 lo, hi; } v16;
typedef struct { __m256 lo, hi; } m16;
#define V_BOTH(op, a, b) ((v16){op((a).lo, (b).lo), op((a).hi, (b).hi)})
INLINE v16 v_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
INLINE m16 m_first(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (m16){_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)),
                 _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane))};
}
INLINE v16 v_load_n(const float *p, int n) {
    m16 m = m_first(n);
    return (v16){_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
INLINE void v_store_n(float *p, v16 a, int n) {
    m16 m = m_first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}
INLINE v16 v_add(v16 a, v16 b) { return V_BOTH(_mm256_add_ps, a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return V_BOTH(_mm256_sub_ps, a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return V_BOTH(_mm256_mul_ps, a, b); }
INLINE v16 v_div(v16 a, v16 b) { return V_BOTH(_mm256_div_ps, a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
INLINE v16 v_sqrt(v16 a) { return (v16){_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
INLINE v16 v_max(v16 a, v16 b) { return V_BOTH(_mm256_max_ps, a, b); }
INLINE v16 v_min(v16 a, v16 b) { return V_BOTH(_mm256_min_ps, a, b); }
INLINE v16 v_select(m16 m, v16 a, v16 b) { return (v16){_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)}; }
#define V_COMPARE(a, b, how) ((m16){_mm256_cmp_ps((a).lo, (b).lo, how), _mm256_cmp_ps((a).hi, (b).hi, how)})
INLINE m16 v_lt(v16 a, v16 b) { return V_COMPARE(a, b, _CMP_LT_OQ); }
INLINE m16 v_le(v16 a, v16 b) { return V_COMPARE(a, b, _CMP_LE_OQ); }
INLINE m16 v_eq(v16 a, v16 b) { return V_COMPARE(a, b, _CMP_EQ_OQ); }
INLINE m16 m_and(m16 a, m16 b) { return (m16){_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
INLINE unsigned m_bits(m16 m) { return (unsigned)_mm256_movemask_ps(m.lo) | (unsigned)_mm256_movemask_ps(m.hi) << 8; }
INLINE m16 m_from_bits(unsigned bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i lo = _mm256_and_si256(_mm256_set1_epi32((int)bits), lane), hi = _mm256_and_si256(_mm256_set1_epi32((int)(bits >> 8)), lane);
    return (m16){_mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, lane)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, lane))};
}
INLINE v16 v_and_bits(v16 a, uint32_t u) { __m256 b = _mm256_castsi256_ps(_mm256_set1_epi32((int)u)); return (v16){_mm256_and_ps(a.lo, b), _mm256_and_ps(a.hi, b)}; }
INLINE v16 v_or_bits(v16 a, uint32_t u) { __m256 b = _mm256_castsi256_ps(_mm256_set1_epi32((int)u)); return (v16){_mm256_or_ps(a.lo, b), _mm256_or_ps(a.hi, b)}; }
INLINE __m256 v_from_exponent_half(__m256 a) { return _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_castps_si256(a), 23)); }
INLINE v16 v_from_exponent(v16 a) { return (v16){v_from_exponent_half(a.lo), v_from_exponent_half(a.hi)}; }
INLINE __m256 v_to_exponent_half(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
INLINE v16 v_to_exponent(v16 a) { return (v16){v_to_exponent_half(a.lo), v_to_exponent_half(a.hi)}; }
INLINE __m256 v_copy_sign_half(__m256 a, __m256 sign) {
    __m256 bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, a), _mm256_and_ps(bit, sign));
}
INLINE v16 v_copy_sign(v16 a, v16 sign) { return V_BOTH(v_copy_sign_half, a, sign); }

#elif defined(CMHA_NEON) /* --------------------------------------------------------------------------- NEON */
#define V_TILE_ROWS 6 /* 6 x 4 registers of accumulators, 4 of B, 1 broadcast: 29 of 32 */
#define V_TILE_VECTORS 1
typedef struct { float32x4_t r[4]; } v16;
typedef struct { uint32x4_t r[4]; } m16;
#define V_EACH(type, expression) type out; for (int i = 0; i < 4; i++) out.r[i] = expression; return out
INLINE v16 v_set1(float x) { V_EACH(v16, vdupq_n_f32(x)); }
INLINE v16 v_load(const float *p) { V_EACH(v16, vld1q_f32(p + 4 * i)); }
INLINE void v_store(float *p, v16 a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.r[i]); }
INLINE v16 v_load_n(const float *p, int n) { float t[16] = {0}; memcpy(t, p, sizeof(float) * (size_t)n); return v_load(t); }
INLINE void v_store_n(float *p, v16 a, int n) { float t[16]; v_store(t, a); memcpy(p, t, sizeof(float) * (size_t)n); }
INLINE m16 m_from_bits(unsigned bits) {
    static const uint32_t lane[4] = {1, 2, 4, 8};
    V_EACH(m16, vceqq_u32(vandq_u32(vdupq_n_u32(bits >> (4 * i)), vld1q_u32(lane)), vld1q_u32(lane)));
}
INLINE m16 m_first(int n) { return m_from_bits(n >= 16 ? 0xffffu : (1u << n) - 1); }
INLINE unsigned m_bits(m16 m) {
    static const uint32_t lane[4] = {1, 2, 4, 8};
    unsigned bits = 0;
    for (int i = 0; i < 4; i++) bits |= vaddvq_u32(vandq_u32(m.r[i], vld1q_u32(lane))) << (4 * i);
    return bits;
}
INLINE v16 v_add(v16 a, v16 b) { V_EACH(v16, vaddq_f32(a.r[i], b.r[i])); }
INLINE v16 v_sub(v16 a, v16 b) { V_EACH(v16, vsubq_f32(a.r[i], b.r[i])); }
INLINE v16 v_mul(v16 a, v16 b) { V_EACH(v16, vmulq_f32(a.r[i], b.r[i])); }
INLINE v16 v_div(v16 a, v16 b) { V_EACH(v16, vdivq_f32(a.r[i], b.r[i])); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { V_EACH(v16, vfmaq_f32(c.r[i], a.r[i], b.r[i])); }
INLINE v16 v_sqrt(v16 a) { V_EACH(v16, vsqrtq_f32(a.r[i])); }
INLINE v16 v_select(m16 m, v16 a, v16 b) { V_EACH(v16, vbslq_f32(m.r[i], a.r[i], b.r[i])); }
INLINE m16 v_lt(v16 a, v16 b) { V_EACH(m16, vcltq_f32(a.r[i], b.r[i])); }
INLINE m16 v_le(v16 a, v16 b) { V_EACH(m16, vcleq_f32(a.r[i], b.r[i])); }
INLINE m16 v_eq(v16 a, v16 b) { V_EACH(m16, vceqq_f32(a.r[i], b.r[i])); }
INLINE v16 v_max(v16 a, v16 b) { return v_select(v_lt(b, a), a, b); }
INLINE v16 v_min(v16 a, v16 b) { return v_select(v_lt(a, b), a, b); }
INLINE m16 m_and(m16 a, m16 b) { V_EACH(m16, vandq_u32(a.r[i], b.r[i])); }
#define V_INT(a) vreinterpretq_u32_f32(a)
INLINE v16 v_and_bits(v16 a, uint32_t u) { V_EACH(v16, vreinterpretq_f32_u32(vandq_u32(V_INT(a.r[i]), vdupq_n_u32(u)))); }
INLINE v16 v_or_bits(v16 a, uint32_t u) { V_EACH(v16, vreinterpretq_f32_u32(vorrq_u32(V_INT(a.r[i]), vdupq_n_u32(u)))); }
INLINE v16 v_from_exponent(v16 a) { V_EACH(v16, vreinterpretq_f32_u32(vshrq_n_u32(V_INT(a.r[i]), 23))); }
INLINE v16 v_to_exponent(v16 a) { V_EACH(v16, vreinterpretq_f32_u32(vshlq_n_u32(V_INT(a.r[i]), 23))); }
INLINE v16 v_copy_sign(v16 a, v16 sign) { V_EACH(v16, vbslq_f32(vdupq_n_u32(0x80000000u), sign.r[i], a.r[i])); }

#else /* --------------------------------------------------------------------------------------------- plain C */
#define V_TILE_ROWS 4
#define V_TILE_VECTORS 1
typedef struct { float r[16]; } v16;
typedef unsigned m16;
#define V_EACH(expression) v16 out; for (int i = 0; i < 16; i++) out.r[i] = expression; return out
#define M_EACH(condition) unsigned out = 0; for (int i = 0; i < 16; i++) out |= (unsigned)(condition) << i; return out
INLINE v16 v_set1(float x) { V_EACH(x); }
INLINE v16 v_load(const float *p) { V_EACH(p[i]); }
INLINE void v_store(float *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = a.r[i]; }
INLINE m16 m_first(int n) { return n >= 16 ? 0xffffu : (1u << n) - 1; }
INLINE v16 v_load_n(const float *p, int n) { V_EACH(i < n ? p[i] : 0.0f); }
INLINE void v_store_n(float *p, v16 a, int n) { for (int i = 0; i < n; i++) p[i] = a.r[i]; }
INLINE v16 v_add(v16 a, v16 b) { V_EACH(a.r[i] + b.r[i]); }
INLINE v16 v_sub(v16 a, v16 b) { V_EACH(a.r[i] - b.r[i]); }
INLINE v16 v_mul(v16 a, v16 b) { V_EACH(a.r[i] * b.r[i]); }
INLINE v16 v_div(v16 a, v16 b) { V_EACH(a.r[i] / b.r[i]); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { V_EACH(f_fma(a.r[i], b.r[i], c.r[i])); }
INLINE v16 v_sqrt(v16 a) { V_EACH(sqrtf(a.r[i])); }
INLINE v16 v_max(v16 a, v16 b) { V_EACH(a.r[i] > b.r[i] ? a.r[i] : b.r[i]); }
INLINE v16 v_min(v16 a, v16 b) { V_EACH(a.r[i] < b.r[i] ? a.r[i] : b.r[i]); }
INLINE v16 v_select(m16 m, v16 a, v16 b) { V_EACH(m >> i & 1 ? a.r[i] : b.r[i]); }
INLINE m16 v_lt(v16 a, v16 b) { M_EACH(a.r[i] < b.r[i]); }
INLINE m16 v_le(v16 a, v16 b) { M_EACH(a.r[i] <= b.r[i]); }
INLINE m16 v_eq(v16 a, v16 b) { M_EACH(a.r[i] == b.r[i]); }
INLINE m16 m_and(m16 a, m16 b) { return a & b; }
INLINE unsigned m_bits(m16 m) { return m; }
INLINE m16 m_from_bits(unsigned bits) { return bits & 0xffffu; }
INLINE v16 v_and_bits(v16 a, uint32_t u) { V_EACH(f_from_bits(f_bits(a.r[i]) & u)); }
INLINE v16 v_or_bits(v16 a, uint32_t u) { V_EACH(f_from_bits(f_bits(a.r[i]) | u)); }
INLINE v16 v_from_exponent(v16 a) { V_EACH(f_from_bits(f_bits(a.r[i]) >> 23)); }
INLINE v16 v_to_exponent(v16 a) { V_EACH(f_from_bits(f_bits(a.r[i]) << 23)); }
INLINE v16 v_copy_sign(v16 a, v16 sign) {
    V_EACH(f_from_bits((f_bits(a.r[i]) & 0x7fffffffu) | (f_bits(sign.r[i]) & 0x80000000u)));
}
#endif

/* ------------------------------------------------------------------------------------- the same on every path */
INLINE v16 v_zero(void) { return v_set1(0.0f); }
INLINE v16 v_abs(v16 a) { return v_and_bits(a, 0x7fffffffu); }

/* Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 pushes the fraction out of the mantissa. */
#define V_MAGIC 12582912.0f
INLINE v16 v_round(v16 a) { const v16 magic = v_set1(V_MAGIC); return v_sub(v_add(a, magic), magic); }

/* 2^n for an integral n in [-127, 128]; 2^-127 counts as 0 and 2^128 as infinity. The same addition leaves n + 127 in the
   low bits of the sum, and v_to_exponent (bits << 23) drops the rest. No conversion, so a NaN is as good as any other. */
INLINE v16 v_power_of_two(v16 n) { return v_to_exponent(v_add(n, v_set1(V_MAGIC + 127.0f))); }

/* The exponent of a normal a > 0: its bits >> 23 are put under the exponent of 2^23, which is then taken off again. */
INLINE v16 v_exponent(v16 a) {
    return v_sub(v_or_bits(v_from_exponent(a), 0x4b000000u), v_set1(8388608.0f + 127.0f));
}

/* The first n floats at p, or all 16 if there are more: masked stores are slow on some CPUs, so only tails use them. */
INLINE v16 v_load_up_to(const float *p, ptrdiff_t n) { return n < 16 ? v_load_n(p, (int)n) : v_load(p); }
INLINE void v_store_up_to(float *p, v16 a, ptrdiff_t n) {
    if (n < 16) v_store_n(p, a, (int)n);
    else v_store(p, a);
}

/* to[c * to_row + r] = from[r * from_row + c] for r, c in 0..15: a 16 x 16 square, transposed. */
#if defined(__AVX2__)
INLINE void v_transpose_8(float *to, ptrdiff_t to_row, const float *from, ptrdiff_t from_row) {
    __m256 a[8], b[8];
    UNROLL(4)
    for (int i = 0; i < 4; i++) { /* rows i and i + 4 side by side, so that all else stays inside halves */
        const float *low = from + i * from_row, *high = from + (i + 4) * from_row; /* a load and an insert: no shuffle */
        a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
        a[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low + 4)), _mm_loadu_ps(high + 4), 1);
    }
    UNROLL(2)
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        b[i + 2] = _mm256_unpacklo_ps(a[i + 2], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_ps(a[i + 2], a[i + 3]);
        _mm256_storeu_ps(to + i * to_row, _mm256_shuffle_ps(b[i], b[i + 2], 0x44));
        _mm256_storeu_ps(to + (i + 1) * to_row, _mm256_shuffle_ps(b[i], b[i + 2], 0xee));
        _mm256_storeu_ps(to + (i + 2) * to_row, _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44));
        _mm256_storeu_ps(to + (i + 3) * to_row, _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee));
    }
}
INLINE void v_transpose(float *to, ptrdiff_t to_row, const float *from, ptrdiff_t from_row) {
    for (int r = 0; r < 16; r += 8)
        for (int c = 0; c < 16; c += 8) v_transpose_8(to + c * to_row + r, to_row, from + r * from_row + c, from_row);
}
#else
INLINE void v_transpose(float *to, ptrdiff_t to_row, const float *from, ptrdiff_t from_row) {
    for (int c = 0; c < 16; c++)
        for (int r = 0; r < 16; r++) to[c * to_row + r] = from[r * from_row + c];
}
#endif

/* One byte a lane, non-zero = set. */
INLINE m16 m_from_bytes(const uint8_t *p, int n) {
    unsigned bits = 0;
    for (int i = 0; i < n; i++) bits |= (unsigned)(p[i] != 0) << i;
    return m_from_bits(bits);
}

/* The fixed tree over 16 lanes: lane i and lane i + 8, then 4, 2, 1 apart. And d16, 16 lanes of double. */
#if defined(__AVX2__)
#ifdef CMHA_AVX512
#define V_LOW(a) _mm512_castps512_ps256(a)
#define V_HIGH(a) _mm512_extractf32x8_ps(a, 1)
#else
#define V_LOW(a) (a).lo
#define V_HIGH(a) (a).hi
#endif
INLINE float v_sum(v16 a) {
    __m256 s8 = _mm256_add_ps(V_LOW(a), V_HIGH(a));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
typedef struct { __m256d r[4]; } d16;
INLINE d16 d_zero(void) { __m256d z = _mm256_setzero_pd(); return (d16){{z, z, z, z}}; }
INLINE d16 d_from(v16 a) {
    __m256 lo = V_LOW(a), hi = V_HIGH(a);
    return (d16){{_mm256_cvtps_pd(_mm256_castps256_ps128(lo)), _mm256_cvtps_pd(_mm256_extractf128_ps(lo, 1)),
                  _mm256_cvtps_pd(_mm256_castps256_ps128(hi)), _mm256_cvtps_pd(_mm256_extractf128_ps(hi, 1))}};
}
INLINE d16 d_load(const double *p) { d16 y; for (int i = 0; i < 4; i++) y.r[i] = _mm256_loadu_pd(p + 4 * i); return y; }
INLINE d16 d_add(d16 a, d16 b) { for (int i = 0; i < 4; i++) a.r[i] = _mm256_add_pd(a.r[i], b.r[i]); return a; }
INLINE d16 d_mul(d16 a, d16 b) { for (int i = 0; i < 4; i++) a.r[i] = _mm256_mul_pd(a.r[i], b.r[i]); return a; }
INLINE double d_sum(d16 a) {
    __m256d s4 = _mm256_add_pd(_mm256_add_pd(a.r[0], a.r[2]), _mm256_add_pd(a.r[1], a.r[3]));
    __m128d s2 = _mm_add_pd(_mm256_castpd256_pd128(s4), _mm256_extractf128_pd(s4, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s2, _mm_unpackhi_pd(s2, s2)));
}
INLINE void d_store_floats(float *p, d16 a) { for (int i = 0; i < 4; i++) _mm_storeu_ps(p + 4 * i, _mm256_cvtpd_ps(a.r[i])); }
#else
#define LANES_SUM(type, r) \
    type s8[8], s4[4]; \
    for (int i = 0; i < 8; i++) s8[i] = r[i] + r[i + 8]; \
    for (int i = 0; i < 4; i++) s4[i] = s8[i] + s8[i + 4]; \
    return (s4[0] + s4[2]) + (s4[1] + s4[3])
INLINE float v_sum(v16 a) { float r[16]; v_store(r, a); LANES_SUM(float, r); }
typedef struct { double r[16]; } d16;
INLINE d16 d_zero(void) { return (d16){{0}}; }
INLINE d16 d_from(v16 a) { float t[16]; d16 y; v_store(t, a); for (int i = 0; i < 16; i++) y.r[i] = (double)t[i]; return y; }
INLINE d16 d_load(const double *p) { d16 y; for (int i = 0; i < 16; i++) y.r[i] = p[i]; return y; }
INLINE d16 d_add(d16 a, d16 b) { for (int i = 0; i < 16; i++) a.r[i] += b.r[i]; return a; }
INLINE d16 d_mul(d16 a, d16 b) { for (int i = 0; i < 16; i++) a.r[i] *= b.r[i]; return a; }
INLINE double d_sum(d16 a) { LANES_SUM(double, a.r); }
INLINE void d_store_floats(float *p, d16 a) { for (int i = 0; i < 16; i++) p[i] = (float)a.r[i]; }
#endif
INLINE float v_highest(v16 a) {
    float r[16], m;
    v_store(r, a);
    m = r[0];
    for (int i = 1; i < 16; i++) m = r[i] > m ? r[i] : m;
    return m;
}
#endif
