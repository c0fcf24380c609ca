/* Included by kernels.c: gradients, and the attention of packed sequences. All in float32. */

/* Sums over rows are made in so many parts, whatever the number of threads, so that they always round alike. */
enum { PARTS = 8 };

/* The gradient of one normalized row: x, weight and grad -> dx; adds to dweight. */
INLINE void norm_backward_row(const float *x, const float *weight,
                                                                    const float *grad, float *dx, float *dweight,
                                                                    int64_t size, float eps) {
    float squares = 0.0f, along = 0.0f;
#pragma omp simd reduction(+ : squares, along)
    for (int64_t i = 0; i < size; i++) {
        squares += x[i] * x[i];
        along += grad[i] * weight[i] * x[i];
    }
    float scale = 1.0f / sqrtf(squares / (float)size + eps);
    float pull = along * scale * scale * scale / (float)size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        dweight[i] += grad[i] * x[i] * scale;
        dx[i] = grad[i] * weight[i] * scale - x[i] * pull;
    }
}

static void sum_parts(const float *parts, float *sum, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        float total = 0.0f;
        for (int64_t part = 0; part < PARTS; part++) total += parts[part * size + i];
        sum[i] = total;
    }
}

/* Returns 0, or 1 if memory ran out; so do the others below. */
int rms_norm_backward_f32(const float *x, const float *weight, const float *grad, float *dx, float *dweight,
                          int64_t rows, int64_t size, float eps, int threads) {
    float *parts = calloc((size_t)(PARTS * size), sizeof(float));
    if (parts == NULL) return 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t row = rows * part / PARTS; row < rows * (part + 1) / PARTS; row++)
            norm_backward_row(x + row * size, weight, grad + row * size, dx + row * size, parts + part * size, size,
                              eps);
    sum_parts(parts, dweight, size);
    free(parts);
    return 0;
}

/* Of norm_rotate; dx has the stride of x. Without a weight nothing is normalized, and dweight is not touched. */
int norm_rotate_backward_f32(const float *x, int64_t x_stride, const float *weight, const float *cosine,
                             const float *sine, const float *grad, float *dx, int64_t dx_stride, float *dweight,
                             int64_t tokens, int64_t heads, int64_t head_dim, float eps, int threads) {
    int64_t half = head_dim / 2;
    float *parts = calloc((size_t)(PARTS * head_dim), sizeof(float));
    if (parts == NULL) return 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t token = tokens * part / PARTS; token < tokens * (part + 1) / PARTS; token++) {
            const float *c = cosine + token * head_dim, *s = sine + token * head_dim;
            for (int64_t head = 0; head < heads; head++) {
                const float *g = grad + (token * heads + head) * head_dim;
                float *to = dx + token * dx_stride + head * head_dim;
                float rotated[MAX_HEAD_DIM];
                float *back = weight == NULL ? to : rotated;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    back[i] = g[i] * c[i] + g[half + i] * s[half + i];
                    back[half + i] = g[half + i] * c[half + i] + g[i] * s[i];
                }
                if (weight != NULL)
                    norm_backward_row(x + token * x_stride + head * head_dim, weight, rotated, to,
                                      parts + part * head_dim, head_dim, eps);
            }
        }
    if (weight != NULL) sum_parts(parts, dweight, head_dim);
    free(parts);
    return 0;
}

void silu_mul_backward_f32(const float *gate_up, const float *grad, float *d_gate_up, int64_t tokens, int64_t size,
                           int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++) {
        const float *gate = gate_up + token * 2 * size, *up = gate + size, *g = grad + token * size;
        float *d_gate = d_gate_up + token * 2 * size, *d_up = d_gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float share = sigmoid(gate[i]);
            d_up[i] = g[i] * gate[i] * share;
            d_gate[i] = g[i] * up[i] * share * (1.0f + gate[i] * (1.0f - share));
        }
    }
}

/* Packed sequences: token t sees `prefix_lengths[t]` tokens from `prefix_starts[t]` on, then those from `starts[t]`
   to itself; with a window above zero only the last so many of them. Tokens with the same start are a segment, and
   lie side by side. The keys and values that a segment sees are copied together once, keys and values also
   transposed, so that all sums run along rows of whole vectors. */
typedef struct {
    const int64_t *starts, *prefix_starts, *prefix_lengths;
    int64_t window, tokens, heads, kv_heads;
} Packed;

/* What one segment sees, of one KV head. Rows of transposed matrices are `width` long, a multiple of LANES. */
typedef struct {
    int64_t first, end, prefix, prefix_start, context, width;
    float *keys, *keys_t, *values, *values_t, *d_keys, *d_values, *scores, *changes;
} Segment;

static int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static int64_t longest_context(const Packed *packed) {
    int64_t longest = 0;
    for (int64_t token = 0; token < packed->tokens; token++) {
        int64_t context = packed->prefix_lengths[token] + token - packed->starts[token] + 1;
        longest = context > longest ? context : longest;
    }
    return longest;
}

/* Room for a segment of any length that occurs, for one thread; NULL if memory ran out. */
static float *new_workspace(int64_t longest, int64_t size, Segment *segment) {
    int64_t width = whole_lanes(longest), matrix = width * size;
    float *memory = malloc(sizeof(float) * (size_t)(6 * matrix + 2 * width));
    if (memory == NULL) return NULL;
    segment->keys = memory;
    segment->keys_t = memory + matrix;
    segment->values = memory + 2 * matrix;
    segment->values_t = memory + 3 * matrix;
    segment->d_keys = memory + 4 * matrix;
    segment->d_values = memory + 5 * matrix;
    segment->scores = memory + 6 * matrix;
    segment->changes = segment->scores + width;
    return memory;
}

static inline int64_t token_at(const Segment *segment, int64_t at) {
    return at < segment->prefix ? segment->prefix_start + at : segment->first + at - segment->prefix;
}

/* The segment that begins at token `first`: its keys and values of one KV head, copied together. */
INLINE void open_segment(const Packed *packed, const float *k, const float *v,
                                                               int64_t v_stride, int64_t first, int64_t kv_head,
                                                               Segment *segment, int64_t size) {
    segment->first = segment->end = first;
    while (segment->end < packed->tokens && packed->starts[segment->end] == packed->starts[first]) segment->end++;
    segment->prefix = packed->prefix_lengths[first];
    segment->prefix_start = packed->prefix_starts[first];
    segment->context = segment->prefix + segment->end - first;
    segment->width = whole_lanes(segment->context);
    for (int64_t at = 0; at < segment->width; at++) {
        float *key = segment->keys + at * size, *value = segment->values + at * size;
        if (at < segment->context) {
            int64_t token = token_at(segment, at);
            memcpy(key, k + (token * packed->kv_heads + kv_head) * size, sizeof(float) * (size_t)size);
            memcpy(value, v + token * v_stride + kv_head * size, sizeof(float) * (size_t)size);
        } else {
            memset(key, 0, sizeof(float) * (size_t)size);
            memset(value, 0, sizeof(float) * (size_t)size);
        }
        for (int64_t i = 0; i < size; i++) {
            segment->keys_t[i * segment->width + at] = key[i];
            segment->values_t[i * segment->width + at] = value[i];
        }
    }
}

/* out = vector · matrix (rows, width) over `count` vectors of columns, whose sums run side by side: one alone would
   wait for each of its additions. */
INLINE void vector_times_few(const float *vector, const float *matrix, int64_t rows, int64_t width, float *out,
                             int64_t count) {
    Lanes sums[4 * VECTORS] = {{0}};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < count; i++) sums[i] += vector[row] * *(const Lanes *)(matrix + row * width + i * LANES);
    for (int64_t i = 0; i < count; i++) *(Lanes *)(out + i * LANES) = sums[i];
}

/* out = vector · matrix (rows, width), over the columns from `from` to `to`, both multiples of LANES */
INLINE void vector_times(const float *vector, const float *matrix, int64_t rows, int64_t width, int64_t from,
                         int64_t to, float *out) {
    int64_t column = from;
    for (; VECTORS > 1 && column + 4 * TOKENS <= to; column += 4 * TOKENS)
        vector_times_few(vector, matrix + column, rows, width, out + column, 4 * VECTORS);
    for (; column + 4 * LANES <= to; column += 4 * LANES)
        vector_times_few(vector, matrix + column, rows, width, out + column, 4);
    switch ((to - column) / LANES) {
        case 3: vector_times_few(vector, matrix + column, rows, width, out + column, 3); break;
        case 2: vector_times_few(vector, matrix + column, rows, width, out + column, 2); break;
        case 1: vector_times_few(vector, matrix + column, rows, width, out + column, 1); break;
    }
}

/* out[row] += factors[row] * vector, for the rows from `from` to `to` */
INLINE void add_outer(const float *factors, const float *vector, float *out,
                                                            int64_t from, int64_t to, int64_t size) {
    for (int64_t row = from; row < to; row++) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[row * size + i] += factors[row] * vector[i];
    }
}

/* Of the segment's context, what a query after `seen` tokens may look at: from `first` on, rounded to lanes. */
typedef struct {
    int64_t first, seen, from, to;
} View;

static inline View view_of(const Packed *packed, const Segment *segment, int64_t token) {
    int64_t seen = segment->prefix + token - segment->first + 1;
    int64_t first = packed->window > 0 && seen > packed->window ? seen - packed->window : 0;
    return (View){first, seen, first / LANES * LANES, whole_lanes(seen)};
}

/* scores = exp(q · keys / sqrt(size) - largest or logsum), 0 where the query does not look. Returns their sum. */
INLINE float shares(const Segment *segment, View view, const float *query,
                                                          float *largest, int64_t size) {
    float scale = 1.0f / sqrtf((float)size), total = 0.0f;
    float *scores = segment->scores;
    vector_times(query, segment->keys_t, size, segment->width, view.from, view.to, scores);
    if (*largest == -INFINITY) {
        float best = -INFINITY;
#pragma omp simd reduction(max : best)
        for (int64_t at = view.first; at < view.seen; at++) best = scores[at] > best ? scores[at] : best;
        *largest = best * scale;
    }
    float top = *largest;
    for (int64_t at = view.from; at < view.first; at++) scores[at] = -INFINITY;
    for (int64_t at = view.seen; at < view.to; at++) scores[at] = -INFINITY;
    for (int64_t start = view.from; start < view.to; start += LANES) {
#pragma omp simd reduction(+ : total)
        for (int64_t at = start; at < start + LANES; at++) {
            float below = scores[at] * scale - top;
            scores[at] = exp_negative(below > 0.0f ? 0.0f : below);
            total += scores[at];
        }
    }
    return total;
}

INLINE void forward_segment(const Packed *packed, const Segment *segment,
                                                                  const float *q, float *out, float *logsums,
                                                                  int64_t head, int64_t size) {
    for (int64_t token = segment->first; token < segment->end; token++) {
        View view = view_of(packed, segment, token);
        int64_t row = token * packed->heads + head;
        float largest = -INFINITY;
        float total = shares(segment, view, q + row * size, &largest, size);
        vector_times(segment->scores + view.first, segment->values + view.first * size, view.seen - view.first, size, 0,
                     size, out + row * size);
        for (int64_t i = 0; i < size; i++) out[row * size + i] /= total;
        logsums[row] = largest + logf(total);
    }
}

INLINE void backward_segment(const Packed *packed, const Segment *segment,
                                                                   const float *q, const float *out,
                                                                   const float *logsums, const float *grad, float *dq,
                                                                   int64_t head, int64_t size) {
    float scale = 1.0f / sqrtf((float)size);
    for (int64_t token = segment->first; token < segment->end; token++) {
        View view = view_of(packed, segment, token);
        int64_t row = token * packed->heads + head;
        const float *query = q + row * size, *g = grad + row * size;
        float logsum = logsums[row], along = 0.0f;
        float *scores = segment->scores, *changes = segment->changes;
        shares(segment, view, query, &logsum, size);
        vector_times(g, segment->values_t, size, segment->width, view.from, view.to, changes);
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < size; i++) along += g[i] * out[row * size + i];
#pragma omp simd
        for (int64_t at = view.from; at < view.to; at++) changes[at] = scores[at] * (changes[at] - along) * scale;
        vector_times(changes + view.first, segment->keys + view.first * size, view.seen - view.first, size, 0, size,
                     dq + row * size);
        add_outer(changes, query, segment->d_keys, view.first, view.seen, size);
        add_outer(scores, g, segment->d_values, view.first, view.seen, size);
    }
}

/* q and out (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim), logsums (tokens, heads). head_dim must be
   a multiple of LANES. Each thread takes whole KV heads. */
int packed_attention_f32(const float *q, const float *k, const float *v, int64_t v_stride, float *out, float *logsums,
                         const int64_t *starts, const int64_t *prefix_starts, const int64_t *prefix_lengths,
                         int64_t window, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                         int threads) {
    Packed packed = {starts, prefix_starts, prefix_lengths, window, tokens, heads, kv_heads};
    int64_t longest = longest_context(&packed), folded = heads / kv_heads;
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
        Segment segment = {0};
        float *memory = new_workspace(longest, head_dim, &segment);
        failed |= memory == NULL;
        for (int64_t first = 0; memory != NULL && first < tokens; first = segment.end) {
#define FORWARD(size)                                                          \
    do {                                                                       \
        open_segment(&packed, k, v, v_stride, first, kv_head, &segment, size); \
        for (int64_t head = kv_head * folded; head < (kv_head + 1) * folded; head++) \
            forward_segment(&packed, &segment, q, out, logsums, head, size);   \
    } while (0)
            BY_HEAD_DIM(FORWARD);
        }
        free(memory);
    }
    return failed;
}

/* dk and dv come as zeros. */
int packed_attention_backward_f32(const float *q, const float *k, const float *v, int64_t v_stride, const float *out,
                                  const float *logsums, const float *grad, float *dq, float *dk, float *dv,
                                  const int64_t *starts, const int64_t *prefix_starts, const int64_t *prefix_lengths,
                                  int64_t window, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                  int threads) {
    Packed packed = {starts, prefix_starts, prefix_lengths, window, tokens, heads, kv_heads};
    int64_t longest = longest_context(&packed), folded = heads / kv_heads;
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
        Segment segment = {0};
        float *memory = new_workspace(longest, head_dim, &segment);
        failed |= memory == NULL;
        for (int64_t first = 0; memory != NULL && first < tokens; first = segment.end) {
#define BACKWARD(size)                                                                                    \
    do {                                                                                                  \
        open_segment(&packed, k, v, v_stride, first, kv_head, &segment, size);                            \
        memset(segment.d_keys, 0, sizeof(float) * (size_t)(segment.context * size));                      \
        memset(segment.d_values, 0, sizeof(float) * (size_t)(segment.context * size));                    \
        for (int64_t head = kv_head * folded; head < (kv_head + 1) * folded; head++)                      \
            backward_segment(&packed, &segment, q, out, logsums, grad, dq, head, size);                   \
        for (int64_t at = 0; at < segment.context; at++) {                                                \
            int64_t to = (token_at(&segment, at) * kv_heads + kv_head) * size;                            \
            for (int64_t i = 0; i < size; i++) dk[to + i] += segment.d_keys[at * size + i];               \
            for (int64_t i = 0; i < size; i++) dv[to + i] += segment.d_values[at * size + i];             \
        }                                                                                                 \
    } while (0)
            BY_HEAD_DIM(BACKWARD);
        }
        free(memory);
    }
    return failed;
}
