/* Included by kernels.c once for each element type: NAME, ELEMENT, LOAD and STORE say which. */

/* out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight */
void NAME(rms_norm)(const ELEMENT *x, int64_t x_stride, const ELEMENT *weight, ELEMENT *out, int64_t rows,
                    int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = x + row * x_stride;
        ELEMENT *to = out + row * size;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += LOAD(from[i]) * LOAD(from[i]);
        float scale = 1.0f / sqrtf(sum / (float)size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = STORE(LOAD(from[i]) * scale * LOAD(weight[i]));
    }
}

/* Every head of x (tokens, heads, head_dim): normalized if there is a weight, then turned by the token's angles.
   cosine and sine (tokens, head_dim); the sign of the turn is in the sine. */
void NAME(norm_rotate)(const ELEMENT *x, int64_t x_stride, const ELEMENT *weight, const ELEMENT *cosine,
                       const ELEMENT *sine, ELEMENT *out, int64_t tokens, int64_t heads, int64_t head_dim, float eps,
                       int threads) {
    int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++) {
        const ELEMENT *c = cosine + token * head_dim, *s = sine + token * head_dim;
        for (int64_t head = 0; head < heads; head++) {
            const ELEMENT *from = x + token * x_stride + head * head_dim;
            ELEMENT *to = out + (token * heads + head) * head_dim;
            float values[MAX_HEAD_DIM];
            if (weight == NULL) {
                for (int64_t i = 0; i < head_dim; i++) values[i] = LOAD(from[i]);
            } else {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < head_dim; i++) sum += LOAD(from[i]) * LOAD(from[i]);
                float scale = 1.0f / sqrtf(sum / (float)head_dim + eps);
#pragma omp simd
                for (int64_t i = 0; i < head_dim; i++) values[i] = LOAD(from[i]) * scale * LOAD(weight[i]);
            }
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                to[i] = STORE(values[i] * LOAD(c[i]) + values[half + i] * LOAD(s[i]));
                to[half + i] = STORE(values[half + i] * LOAD(c[half + i]) + values[i] * LOAD(s[half + i]));
            }
        }
    }
}

/* gate_up (tokens, 2 * size) -> silu(gate) * up (tokens, size) */
void NAME(silu_mul)(const ELEMENT *gate_up, ELEMENT *out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++) {
        const ELEMENT *gate = gate_up + token * 2 * size, *up = gate + size;
        ELEMENT *to = out + token * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = LOAD(gate[i]);
            to[i] = STORE(g * sigmoid(g) * LOAD(up[i]));
        }
    }
}

/* One query token of one sequence over its blocks, for the query heads that share a KV head. */
static inline __attribute__((always_inline)) void NAME(attend_heads)(
    const ELEMENT *q, const ELEMENT *keys, const ELEMENT *values, const int64_t *table, ELEMENT *out, float *scores,
    int64_t first, int64_t end, int64_t block_size, int64_t token_stride, int64_t folded, int64_t head_dim) {
    float scale = 1.0f / sqrtf((float)head_dim);
    int64_t context = end - first;
    for (int64_t head = 0; head < folded; head++) {
        float query[MAX_HEAD_DIM];
        float *row = scores + head * context;
        for (int64_t i = 0; i < head_dim; i++) query[i] = LOAD(q[head * head_dim + i]) * scale;
        float largest = -INFINITY;
        for (int64_t at = first; at < end; at++) {
            const ELEMENT *key = keys + (table[at / block_size] * block_size + at % block_size) * token_stride;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < head_dim; i++) sum += query[i] * LOAD(key[i]);
            row[at - first] = sum;
            largest = sum > largest ? sum : largest;
        }
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < context; i++) {
            row[i] = exp_negative(row[i] - largest);
            total += row[i];
        }
        float mixed[MAX_HEAD_DIM];
        for (int64_t i = 0; i < head_dim; i++) mixed[i] = 0.0f;
        for (int64_t at = first; at < end; at++) {
            const ELEMENT *value = values + (table[at / block_size] * block_size + at % block_size) * token_stride;
            float share = row[at - first];
#pragma omp simd
            for (int64_t i = 0; i < head_dim; i++) mixed[i] += share * LOAD(value[i]);
        }
        float inverse = 1.0f / total;
        for (int64_t i = 0; i < head_dim; i++) out[head * head_dim + i] = STORE(mixed[i] * inverse);
    }
}

/* Decoding: each row has one new token, at positions[row]. Its key and value go into the cache, then its queries
   look at everything in the sequence's blocks up to it, or at the last `window` tokens if that is above zero.
   keys and values: (blocks, block_size, kv_heads, head_dim). Returns 0, or 1 if memory ran out. */
int NAME(decode_attention)(const ELEMENT *q, int64_t q_stride, const ELEMENT *k, int64_t k_stride, const ELEMENT *v,
                           int64_t v_stride, ELEMENT *keys, ELEMENT *values, const int64_t *tables,
                           int64_t table_stride, const int64_t *positions, ELEMENT *out, int64_t rows, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int threads) {
    int64_t folded = heads / kv_heads, token_stride = kv_heads * head_dim;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++) longest = positions[row] >= longest ? positions[row] + 1 : longest;
    float *scores = malloc(sizeof(float) * (size_t)(longest * folded * threads));
    if (scores == NULL) return 1;
    /* Each thread takes a run of rows, and one part of `scores`. */
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *own = scores + thread * longest * folded;
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const int64_t *table = tables + row * table_stride;
            int64_t position = positions[row], end = position + 1;
            int64_t first = window > 0 && end > window ? end - window : 0;
            int64_t slot = (table[position / block_size] * block_size + position % block_size) * token_stride;
            memcpy(keys + slot, k + row * k_stride, sizeof(ELEMENT) * (size_t)token_stride);
            memcpy(values + slot, v + row * v_stride, sizeof(ELEMENT) * (size_t)token_stride);
            for (int64_t head = 0; head < kv_heads; head++) {
                const ELEMENT *query = q + row * q_stride + head * folded * head_dim;
                ELEMENT *to = out + (row * heads + head * folded) * head_dim;
                const ELEMENT *key = keys + head * head_dim, *value = values + head * head_dim;
/* A head size that the compiler knows lets it keep sums in registers. */
#define ATTEND(size) \
    NAME(attend_heads)(query, key, value, table, to, own, first, end, block_size, token_stride, folded, size)
                if (head_dim == 32) ATTEND(32);
                else if (head_dim == 64) ATTEND(64);
                else if (head_dim == 128) ATTEND(128);
                else ATTEND(head_dim);
#undef ATTEND
            }
        }
    }
    free(scores);
    return 0;
}

/* One draw for each row of logits: the first token at which the sum of probabilities passes the row's uniform
   number, or the likeliest token where the temperature is 0. logprobs: at the temperature (0: at temperature 1);
   NaN where the logits are unusable. */
void NAME(draw)(const ELEMENT *logits, int64_t stride, int64_t rows, int64_t size, const float *temperatures,
                const float *uniforms, int64_t *tokens, float *logprobs, int threads) {
    enum { PART = 512 };
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = logits + row * stride;
        float inverse = temperatures[row] == 0.0f ? 1.0f : 1.0f / temperatures[row];
        float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < size; i++) largest = LOAD(from[i]) > largest ? LOAD(from[i]) : largest;
        double total = 0.0;
        for (int64_t start = 0; start < size; start += PART) {
            int64_t end = start + PART < size ? start + PART : size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) sum += exp_negative((LOAD(from[i]) - largest) * inverse);
            total += sum;
        }
        int64_t token = 0;
        if (temperatures[row] == 0.0f) {
            while (token < size - 1 && LOAD(from[token]) != largest) token++;
        } else {
            double target = (double)uniforms[row] * total, passed = 0.0;
            int64_t last = 0; /* the last token with any probability, should rounding leave the target unreached */
            int found = 0;
            for (int64_t start = 0; start < size && !found; start += PART) {
                int64_t end = start + PART < size ? start + PART : size;
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = start; i < end; i++) sum += exp_negative((LOAD(from[i]) - largest) * inverse);
                if (passed + sum <= target && end < size) {
                    passed += sum;
                    continue;
                }
                double within = passed;
                for (int64_t i = start; i < end; i++) {
                    float weight = exp_negative((LOAD(from[i]) - largest) * inverse);
                    if (weight > 0.0f) last = i;
                    within += weight;
                    if (within > target && weight > 0.0f) {
                        found = 1;
                        break;
                    }
                }
                token = last;
                passed += sum;
            }
        }
        tokens[row] = token;
        float logprob = (LOAD(from[token]) - largest) * inverse - (float)log(total);
        logprobs[row] = total > 0.0 && total < INFINITY ? logprob : NAN;
    }
}
