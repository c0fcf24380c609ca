/* What a model does between its matrix products, on a CPU, in one pass over memory each.

   PyTorch spends more time on starting these small operations, and on copying their inputs together, than on
   computing them. Every row is computed by itself, in an order that depends on nothing but its own length: results
   do not depend on the batch or on the number of threads.

   Tensors come as pointers with row strides, all counted in elements. `inference.h` holds the functions that exist
   for float32 and for bfloat16, with sums in float32 either way; `exact.h` those of exact mode, for both as well;
   `training.h` those that training needs besides, in float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined __AVX2__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

#define MAX_HEAD_DIM 512
#define INLINE static inline __attribute__((always_inline))

/* Vectors as wide as the machine's (AVX-512; AVX; NEON and SSE): what compilers make of wider ones is slow. */
#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { CACHE_LINE = 64 };
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

/* So many tokens are looked at together. Of narrow vectors it takes two: one alone would keep too few sums running. */
enum { TOKENS = LANES < 8 ? 8 : LANES, VECTORS = TOKENS / LANES };

/* Lane n: the sum of the n-th of LANES vectors, which are overwritten. Halves are added to halves, then quarters to
   quarters, and so on, of two vectors at a time. */
#if defined __clang__ || __GNUC__ >= 12
#define PICK __builtin_shufflevector
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (Words){__VA_ARGS__})
#endif
INLINE Lanes sums_of(Lanes *x) {
#if defined __AVX512F__
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++)
        x[n] = PICK(x[n], x[n + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(x[n], x[n + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
        x[n] = PICK(x[n], x[n + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PICK(x[n], x[n + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++)
        x[n] = PICK(x[n], x[n + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(x[n], x[n + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return PICK(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif defined __AVX__
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
        x[n] = PICK(x[n], x[n + 4], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(x[n], x[n + 4], 4, 5, 6, 7, 12, 13, 14, 15);
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++)
        x[n] = PICK(x[n], x[n + 2], 0, 1, 8, 9, 4, 5, 12, 13) + PICK(x[n], x[n + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) x[n] = PICK(x[n], x[n + 2], 0, 1, 4, 5) + PICK(x[n], x[n + 2], 2, 3, 6, 7);
    return PICK(x[0], x[1], 0, 4, 2, 6) + PICK(x[0], x[1], 1, 5, 3, 7);
#endif
}
#undef PICK

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* exp for x <= 0, within 2e-7 of the true value relatively, in a form that compilers vectorize. Below -87 it is 0;
   NaN stays NaN. */
static inline float exp_negative(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(clamped * 1.44269504088896341f);
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float scale = bits_to_float((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : p * scale;
}

static inline float sigmoid(float x) {
    float e = exp_negative(-fabsf(x));
    float s = 1.0f / (1.0f + e);
    return x >= 0.0f ? s : e * s;
}

/* Attention of one query so far: the largest score, the sum of exp(score - largest), and the values mixed by it.
   A state holds them one after the other, the values as `size` floats. */
enum { LARGEST, TOTAL, MIXED };

/* How many queries are taken at once: so many sums run side by side that none waits for its last addition. */
enum { TOGETHER = 8 };

/* weights = exp(scores - largest) of one query, carrying its state on; returns how much what was mixed before fades. */
INLINE float weigh(float *scores, int64_t count, float *state) {
    float before = state[LARGEST], largest = before, sum = 0.0f;
    for (int64_t at = count; at < TOKENS; at++) scores[at] = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t at = 0; at < TOKENS; at++) largest = scores[at] > largest ? scores[at] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t at = 0; at < TOKENS; at++) {
        scores[at] = exp_negative(scores[at] - largest);
        sum += scores[at];
    }
    float fading = exp_negative(before - largest);
    state[LARGEST] = largest;
    state[TOTAL] = state[TOTAL] * fading + sum;
    return fading;
}

/* sums[n] = query n · keys, of TOGETHER queries; keys come transposed, (size, TOKENS). */
INLINE void multiply(const float *queries, const float *keys_t, Lanes sums[TOGETHER][VECTORS], int64_t size) {
    if (VECTORS == 1) {
        for (int64_t i = 0; i < size; i++) {
            Lanes key = *(const Lanes *)(keys_t + i * LANES);
#pragma GCC unroll 8
            for (int64_t n = 0; n < TOGETHER; n++) sums[n][0] += queries[n * size + i] * key;
        }
        return;
    }
    /* A query's next numbers come as one vector: NEON multiplies by a lane of it. */
    for (int64_t i = 0; i < size; i += LANES) {
        Lanes keys[LANES][VECTORS];
        memcpy(keys, keys_t + i * TOKENS, sizeof keys);
#pragma GCC unroll 8
        for (int64_t n = 0; n < TOGETHER; n++) {
            Lanes query = *(const Lanes *)(queries + n * size + i);
#pragma GCC unroll 4
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t part = 0; part < VECTORS; part++) sums[n][part] += query[lane] * keys[lane][part];
        }
    }
}

/* Keys and values of `count` tokens, at most TOKENS, for many queries, whose states are carried on. Keys come
   transposed, (size, TOKENS); values as (TOKENS, size). The number of queries is a multiple of TOGETHER. */
INLINE void attend_lanes(const float *keys_t, const float *values, int64_t count, const float *queries, float *states,
                         int64_t num_queries, int64_t size) {
    int64_t state_size = MIXED + size;
    for (int64_t query = 0; query < num_queries; query += TOGETHER) {
        Lanes sums[TOGETHER][VECTORS] = {{{0}}};
        multiply(queries + query * size, keys_t, sums, size);
        float scores[TOGETHER][TOKENS];
        memcpy(scores, sums, sizeof scores);
        for (int64_t n = 0; n < TOGETHER; n += 2) {
            float *one = states + (query + n) * state_size, *two = one + state_size;
            float *weights = scores[n], *others = scores[n + 1];
            float fading = weigh(weights, count, one), other_fading = weigh(others, count, two);
            for (int64_t part = 0; part < size; part += 4 * LANES) {
                int64_t width = size - part < 4 * LANES ? (size - part) / LANES : 4;
                Lanes mixed[4], other_mixed[4];
                for (int64_t i = 0; i < width; i++) {
                    mixed[i] = fading * *(Lanes *)(one + MIXED + part + i * LANES);
                    other_mixed[i] = other_fading * *(Lanes *)(two + MIXED + part + i * LANES);
                }
                for (int64_t at = 0; at < count; at++)
                    for (int64_t i = 0; i < width; i++) {
                        Lanes value = *(const Lanes *)(values + at * size + part + i * LANES);
                        mixed[i] += weights[at] * value;
                        other_mixed[i] += others[at] * value;
                    }
                for (int64_t i = 0; i < width; i++) {
                    *(Lanes *)(one + MIXED + part + i * LANES) = mixed[i];
                    *(Lanes *)(two + MIXED + part + i * LANES) = other_mixed[i];
                }
            }
        }
    }
}

/* A head size that the compiler knows lets it keep sums in registers. */
#define BY_HEAD_DIM(call)                \
    if (head_dim == 32) call(32);        \
    else if (head_dim == 64) call(64);   \
    else if (head_dim == 128) call(128); \
    else call(head_dim)

/* Where the tokens from `first` to `end` of a sequence lie in its blocks, in elements; the last one again until
   TOKENS divides their number. Returns how many tokens those are. */
static int64_t offsets_of(const int64_t *table, int64_t first, int64_t end, int64_t block_size, int64_t token_stride,
                          int64_t *offsets) {
    int64_t count = 0, at = first % block_size;
    for (int64_t block = first / block_size; first + count < end; block++, at = 0)
        for (; at < block_size && first + count < end; at++)
            offsets[count++] = (table[block] * block_size + at) * token_stride;
    for (int64_t i = count; i % TOKENS != 0; i++) offsets[i] = offsets[count - 1];
    return count;
}

enum { PART = 512 }; /* probabilities that are added up in float32, before their sum goes into one of float64 */
enum { MAX_RUN = 64 }; /* rows that are looked at together */

/* How many rows from `row` on begin with the same blocks as it, and in `shared` how many tokens that is: whole
   blocks, before the last token of each. Few tokens or rows are not worth it. */
static int64_t run_of_rows(const int64_t *tables, int64_t table_stride, const int64_t *positions, int64_t row,
                           int64_t end, int64_t block_size, int64_t window, int64_t *shared) {
    int64_t blocks = positions[row] / block_size, next = row + 1;
    const int64_t *table = tables + row * table_stride;
    *shared = 0;
    if (window > 0) return 1;
    for (; next < end && next - row < MAX_RUN; next++) {
        int64_t same = 0, most = positions[next] / block_size < blocks ? positions[next] / block_size : blocks;
        const int64_t *other = tables + next * table_stride;
        while (same < most && table[same] == other[same]) same++;
        if (same * block_size < TOKENS) break;
        blocks = same;
    }
    if (next - row < 2) return 1;
    *shared = blocks * block_size;
    return next - row;
}

/* Matrix products of exact mode: TILE rows by PANEL outputs at once, which fills the registers. TILES_TOGETHER of them
   go by one panel of weights, and at most TILES are laid out at once. */
#if defined __AVX512F__ || defined __aarch64__
enum { TILE = 8 };
#else
enum { TILE = 6 };
#endif
enum { PANEL = 2 * LANES, TILES = 64, TILES_TOGETHER = 8 };

/* The log-prob of a token by its logit: in one place, so that it rounds alike wherever it is asked for. */
static __attribute__((noinline)) float logprob_of(float logit, float largest, float inverse, double total) {
    float logprob = (logit - largest) * inverse - (float)log(total);
    return total > 0.0 && total < INFINITY ? logprob : NAN;
}

/* float32 */
#define NAME(name) name##_f32
#define ELEMENT float
#define LOAD(x) (x)
#define STORE(x) (x)
#define LOAD_LANES(at) (*(const Lanes *)(at))
#include "inference.h"
#include "exact.h"
#undef LOAD_LANES
#undef NAME
#undef ELEMENT
#undef LOAD
#undef STORE

/* bfloat16: the upper half of a float32, rounded to the nearest, ties to even */
static inline float bf16_load(uint16_t x) { return bits_to_float((uint32_t)x << 16); }

static inline uint16_t bf16_store(float x) {
    uint32_t bits = float_to_bits(x);
    uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    return x != x ? (uint16_t)0x7FC0u : rounded;
}

/* By name, where the machine has an instruction for it: compilers do not always find it. */
INLINE Lanes bf16_load_lanes(const uint16_t *from) {
#if defined __AVX512F__
    return (Lanes)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)) << 16);
#elif defined __AVX2__
    return (Lanes)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)) << 16);
#elif defined __aarch64__
    return (Lanes)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(from), vdup_n_u16(0)));
#else
    Words bits;
    for (int n = 0; n < LANES; n++) bits[n] = (uint32_t)from[n] << 16;
    return (Lanes)bits;
#endif
}

#define NAME(name) name##_bf16
#define ELEMENT uint16_t
#define LOAD(x) bf16_load(x)
#define STORE(x) bf16_store(x)
#define LOAD_LANES(at) bf16_load_lanes(at)
#include "inference.h"
#include "exact.h"

#include "training.h"

/* Whether the compiler took OpenMP's threads; without them everything is computed, one part after the other. */
#ifdef _OPENMP
const int uses_threads = 1;
#else
const int uses_threads = 0;
#endif
