/* What a model does between its matrix products, on a CPU, in one pass over memory each.

   PyTorch spends more time on starting these small operations, and on copying their inputs together, than on
   computing them. Every row is computed by itself, in an order that depends on nothing but its own length: results
   do not depend on the batch or on the number of threads.

   Tensors come as pointers with row strides, all counted in elements. `inference.h` holds the functions that exist
   for float32 and for bfloat16, with sums in float32 either way; `training.h` those that training needs besides, in
   float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEAD_DIM 512

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

/* float32 */
#define NAME(name) name##_f32
#define ELEMENT float
#define LOAD(x) (x)
#define STORE(x) (x)
#include "inference.h"
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

#define NAME(name) name##_bf16
#define ELEMENT uint16_t
#define LOAD(x) bf16_load(x)
#define STORE(x) bf16_store(x)
#include "inference.h"

#include "training.h"
