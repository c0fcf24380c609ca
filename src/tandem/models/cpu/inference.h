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

/* Every head of x (tokens, heads, head_dim): RMS-normalized if there is a weight, then RoPE applied.
   cosine and sine (tokens, head_dim); the sign of the rotation is in the sine. */
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

/* Have one head of a token brought from memory while something else is computed: where the blocks of a sequence lie,
   no processor can guess. */
INLINE void NAME(fetch)(const ELEMENT *head, int64_t size) {
    for (int64_t i = 0; i < size; i += CACHE_LINE / (int64_t)sizeof(ELEMENT)) __builtin_prefetch(head + i);
}

/* Adds to the states of a few queries, at most 4, the values of `count` tokens, times their weights. Every value is
   taken from memory once for all of them. `next`: the keys that will be looked at afterwards. */
INLINE void NAME(mix)(const ELEMENT *values, const ELEMENT *next, const int64_t *offsets, int64_t count,
                      const float *weights, int64_t weights_stride, float *states, int64_t num_queries, int64_t size) {
    int64_t state_size = MIXED + size;
    for (int64_t part = 0; part < size; part += 4 * LANES) {
        int64_t width = size - part < 4 * LANES ? (size - part) / LANES : 4;
        float *to = states + MIXED + part;
        Lanes mixed[4][4];
        for (int64_t n = 0; n < num_queries; n++)
            for (int64_t i = 0; i < width; i++) mixed[n][i] = *(Lanes *)(to + n * state_size + i * LANES);
        for (int64_t at = 0; at < count; at++) {
            if (part == 0) NAME(fetch)(next + offsets[at], size);
            for (int64_t i = 0; i < width; i++) {
                Lanes value = LOAD_LANES(values + offsets[at] + part + i * LANES);
                for (int64_t n = 0; n < num_queries; n++) mixed[n][i] += weights[n * weights_stride + at] * value;
            }
        }
        for (int64_t n = 0; n < num_queries; n++)
            for (int64_t i = 0; i < width; i++) *(Lanes *)(to + n * state_size + i * LANES) = mixed[n][i];
    }
}

/* The queries of one row that share a KV head look at `count` tokens, which lie at `offsets`: their states are carried
   on. There are offsets for a multiple of TOKENS. */
INLINE void NAME(attend_own)(const float *queries, const ELEMENT *keys, const ELEMENT *values, const int64_t *offsets,
                             int64_t count, float *states, float *scores, int64_t folded, int64_t size) {
    int64_t state_size = MIXED + size, padded = (count + TOKENS - 1) / TOKENS * TOKENS;
    for (int64_t first = 0; first < count; first += TOKENS) {
        for (int64_t query = 0; query < folded; query++) {
            Lanes sums[TOKENS] = {{0}};
            for (int64_t i = 0; i < size; i += LANES) {
                Lanes q = *(const Lanes *)(queries + query * size + i);
#pragma GCC unroll 16
                for (int64_t n = 0; n < TOKENS; n++) sums[n] += q * LOAD_LANES(keys + offsets[first + n] + i);
            }
            for (int64_t n = 0; n < TOKENS; n += LANES)
                *(Lanes *)(scores + query * padded + first + n) = sums_of(sums + n);
        }
        for (int64_t n = 0; n < TOKENS; n++) NAME(fetch)(values + offsets[first + n], size);
    }
    for (int64_t query = 0; query < folded; query++) {
        float *own = scores + query * padded, *state = states + query * state_size;
        float largest = state[LARGEST], total = 0.0f;
        for (int64_t i = count; i < padded; i++) own[i] = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < padded; i++) largest = own[i] > largest ? own[i] : largest;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < padded; i++) {
            own[i] = exp_negative(own[i] - largest);
            total += own[i];
        }
        float fading = exp_negative(state[LARGEST] - largest);
        state[LARGEST] = largest;
        state[TOTAL] = state[TOTAL] * fading + total;
        for (int64_t i = 0; i < size; i++) state[MIXED + i] *= fading;
    }
    const ELEMENT *next = keys + size; /* the next head's */
    for (int64_t query = 0; query < folded; query += 4) {
#define MIX(num_queries)                                                                                      \
    NAME(mix)(values, next, offsets, count, scores + query * padded, padded, states + query * state_size, num_queries, \
              size)
        if (folded - query >= 4) MIX(4);
        else if (folded - query == 3) MIX(3);
        else if (folded - query == 2) MIX(2);
        else MIX(1);
#undef MIX
    }
}

/* Rows whose sequences begin with the same `shared` tokens, for one KV head: those tokens are looked at together,
   which takes each key from memory once instead of once a query; then each row looks at the rest of its own. */
INLINE void NAME(attend_rows)(const ELEMENT *q, int64_t q_stride, const ELEMENT *keys, const ELEMENT *values,
                              const int64_t *tables, int64_t table_stride, const int64_t *positions, ELEMENT *out,
                              int64_t out_stride, int64_t rows, int64_t shared, float *workspace, int64_t *offsets,
                              int64_t block_size, int64_t token_stride, int64_t window, int64_t folded,
                              int64_t size) {
    float scale = 1.0f / sqrtf((float)size);
    int64_t num_queries = rows * folded, padded = (num_queries + TOGETHER - 1) / TOGETHER * TOGETHER, state_size = MIXED + size;
    float *queries = workspace, *states = queries + padded * size, *keys_t = states + padded * state_size;
    float *few_values = keys_t + TOKENS * size, *scores = few_values + TOKENS * size;
    memset(queries, 0, sizeof(float) * (size_t)(padded * (size + state_size)));
    for (int64_t query = 0; query < padded; query++) states[query * state_size + LARGEST] = -INFINITY;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < folded * size; i++)
            queries[row * folded * size + i] = LOAD(q[row * q_stride + i]) * scale;
    for (int64_t first = 0; first < shared; first += TOKENS) {
        int64_t count = shared - first < TOKENS ? shared - first : TOKENS;
        for (int64_t at = 0; at < count; at++) {
            int64_t token = tables[(first + at) / block_size] * block_size + (first + at) % block_size;
            const ELEMENT *key = keys + token * token_stride, *value = values + token * token_stride;
            for (int64_t i = 0; i < size; i++) keys_t[i * TOKENS + at] = LOAD(key[i]);
            for (int64_t i = 0; i < size; i++) few_values[at * size + i] = LOAD(value[i]);
        }
        attend_lanes(keys_t, few_values, count, queries, states, padded, size);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = positions[row] + 1, first = window > 0 && end > window ? end - window : 0;
        first = first > shared ? first : shared;
        int64_t count = offsets_of(tables + row * table_stride, first, end, block_size, token_stride, offsets);
        float *own = states + row * folded * state_size;
        NAME(attend_own)(queries + row * folded * size, keys, values, offsets, count, own, scores, folded, size);
        for (int64_t head = 0; head < folded; head++) {
            float *state = own + head * state_size;
            float inverse = 1.0f / state[TOTAL];
            for (int64_t i = 0; i < size; i++)
                out[row * out_stride + head * size + i] = STORE(state[MIXED + i] * inverse);
        }
    }
}

/* Decoding: each row has one new token, at positions[row]. Its key and value go into the cache, then its queries
   look at everything in the sequence's blocks up to it, or at the last `window` tokens if that is above zero.
   keys and values: (blocks, block_size, kv_heads, head_dim), head_dim a multiple of LANES. Returns 0, or 1 if memory
   ran out. */
int NAME(decode_attention)(const ELEMENT *q, int64_t q_stride, const ELEMENT *k, int64_t k_stride, const ELEMENT *v,
                           int64_t v_stride, ELEMENT *keys, ELEMENT *values, const int64_t *tables,
                           int64_t table_stride, const int64_t *positions, ELEMENT *out, int64_t rows, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t window, int threads) {
    int64_t folded = heads / kv_heads, token_stride = kv_heads * head_dim, longest = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t *table = tables + row * table_stride;
        int64_t position = positions[row];
        int64_t slot = (table[position / block_size] * block_size + position % block_size) * token_stride;
        memcpy(keys + slot, k + row * k_stride, sizeof(ELEMENT) * (size_t)token_stride);
        memcpy(values + slot, v + row * v_stride, sizeof(ELEMENT) * (size_t)token_stride);
        longest = position >= longest ? position + 1 : longest;
    }
    int64_t most_queries = (rows < MAX_RUN ? rows : MAX_RUN) * folded + TOGETHER;
    int64_t room = most_queries * (2 * head_dim + MIXED) + 2 * TOKENS * head_dim + (longest + TOKENS) * folded;
    float *workspace = malloc(sizeof(float) * (size_t)(room * threads));
    int64_t *offsets = malloc(sizeof(int64_t) * (size_t)((longest + TOKENS) * threads));
    if (workspace == NULL || offsets == NULL) {
        free(workspace);
        free(offsets);
        return 1;
    }
    /* Each thread takes a run of rows, and one part of the workspace. */
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *own = workspace + thread * room;
        int64_t end = rows * (thread + 1) / threads;
        for (int64_t row = rows * thread / threads, count; row < end; row += count) {
            int64_t shared;
            count = run_of_rows(tables, table_stride, positions, row, end, block_size, window, &shared);
            for (int64_t head = 0; head < kv_heads; head++) {
#define ATTEND(size)                                                                                              \
    NAME(attend_rows)(q + row * q_stride + head * folded * size, q_stride, keys + head * size, values + head * size, \
                      tables + row * table_stride, table_stride, positions + row,                                 \
                      out + (row * heads + head * folded) * size, heads * size, count, shared, own,               \
                      offsets + thread * (longest + TOKENS), block_size, token_stride, window, folded, size)
                BY_HEAD_DIM(ATTEND);
#undef ATTEND
            }
        }
    }
    free(workspace);
    free(offsets);
    return 0;
}

/* The largest of a row of logits, and the sum of exp((logit - largest) / temperature) over all of them. */
static __attribute__((noinline)) double NAME(normalizer)(const ELEMENT *from, int64_t size, float inverse,
                                                         float *largest_logit) {
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
    *largest_logit = largest;
    return total;
}

/* One draw for each row of logits: the first token at which the sum of probabilities passes the row's uniform
   number, or the likeliest token where the temperature is 0. logprobs: at the temperature (0: at temperature 1);
   NaN where the logits are unusable. */
void NAME(draw)(const ELEMENT *logits, int64_t stride, int64_t rows, int64_t size, const float *temperatures,
                const float *uniforms, int64_t *tokens, float *logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = logits + row * stride;
        float inverse = temperatures[row] == 0.0f ? 1.0f : 1.0f / temperatures[row];
        float largest;
        double total = NAME(normalizer)(from, size, inverse, &largest);
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
        logprobs[row] = logprob_of(LOAD(from[token]), largest, inverse, total);
    }
}
