/* What the machine can do at most, for the column "of peak": compiled by machine.py on the machine it runs on. */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float v __attribute__((vector_size(BYTES), aligned(4)));
enum { LANES = BYTES / 4, CHAINS = 12, STREAMS = 4 };

/* n rounds of CHAINS independent a = a x + b on registers, x and b random: 2 CHAINS LANES n FLOP, returned. */
double peak_fma(long n, const float *random, float *out)
{
    v a[CHAINS], x, b;
    for (int j = 0; j < LANES; j++)
        x[j] = 0.5f + 0.25f * random[j], b[j] = random[LANES + j];
    for (int i = 0; i < CHAINS; i++)
        a[i] = b * (float)(i + 1);
    for (long r = 0; r < n; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            a[i] = a[i] * x + b;
    }
    for (int i = 1; i < CHAINS; i++)
        a[0] += a[i];
    for (int j = 0; j < LANES; j++)
        out[j] = a[0][j];
    return 2.0 * CHAINS * LANES * n;
}

/* Reads n floats as STREAMS far-apart streams; returns the bytes read. */
double peak_read(long n, const float *x, float *out)
{
    long part = n / STREAMS / (4 * LANES) * (4 * LANES);
    v a[STREAMS][4] = {{{0}}};
    for (long i = 0; i < part; i += 4 * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < STREAMS; s++)
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++)
                a[s][u] += *(const v *)(x + s * part + i + u * LANES);
    v sum = {0};
    for (int s = 0; s < STREAMS; s++)
        for (int u = 0; u < 4; u++)
            sum += a[s][u];
    for (int j = 0; j < LANES; j++)
        out[j] = sum[j];
    return 4.0 * STREAMS * part;
}
