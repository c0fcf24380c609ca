/* Included by kernels.c once for each element type, after inference.h: the forward pass of exact mode.

   Engine and trainer call the same functions here, whatever the layout of their batch. What comes out for a token
   depends on that token and its context alone: every sum runs in one order, by one piece of compiled code, which is why
   the functions that add up are not inlined and have no special cases for few rows. */

/* TILE rows of x times PANEL outputs; every sum runs over the inputs from first to last. x: (inputs, TILE), panel:
   (inputs, PANEL), sums: (TILE, PANEL) */
static __attribute__((noinline)) void NAME(multiply_tile)(const float *x, const ELEMENT *panel, int64_t inputs,
                                                          float *sums) {
    Lanes totals[TILE][2] = {{{0}}};
    for (int64_t k = 0; k < inputs; k++) {
        Lanes one = LOAD_LANES(panel + k * PANEL), two = LOAD_LANES(panel + k * PANEL + LANES);
#pragma GCC unroll 8
        for (int64_t row = 0; row < TILE; row++) {
            totals[row][0] += x[k * TILE + row] * one;
            totals[row][1] += x[k * TILE + row] * two;
        }
    }
    memcpy(sums, totals, sizeof totals);
}

/* weight (outputs, inputs) -> packed (panels, inputs, PANEL), with zeros for the outputs that are not there */
void NAME(pack_panels)(const ELEMENT *weight, int64_t stride, ELEMENT *packed, int64_t outputs, int64_t inputs,
                       int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++) {
        ELEMENT *to = packed + panel * PANEL * inputs;
        int64_t width = outputs - panel * PANEL < PANEL ? outputs - panel * PANEL : PANEL;
        if (width < PANEL) memset(to, 0, sizeof(ELEMENT) * (size_t)(PANEL * inputs));
        for (int64_t first = 0; first < inputs; first += 16) {
            int64_t end = first + 16 < inputs ? first + 16 : inputs;
            for (int64_t n = 0; n < width; n++) {
                const ELEMENT *from = weight + (panel * PANEL + n) * stride;
                for (int64_t k = first; k < end; k++) to[k * PANEL + n] = from[k];
            }
        }
    }
}

/* out (rows, outputs) = x (rows, inputs) · weightᵀ + bias, with the weight as pack_panels laid it out. Tiles are
   always whole: a row without neighbours is computed TILE times. Returns 0, or 1 if memory ran out. */
int NAME(exact_linear)(const ELEMENT *x, int64_t x_stride, const ELEMENT *packed, const ELEMENT *bias, ELEMENT *out,
                       int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    int64_t most = rows < TILES * TILE ? rows : TILES * TILE, panels = (outputs + PANEL - 1) / PANEL;
    float *tiles = malloc(sizeof(float) * (size_t)((most + TILE - 1) / TILE * TILE * inputs));
    if (tiles == NULL) return 1;
    for (int64_t first = 0; first < rows; first += TILES * TILE) {
        int64_t left = rows - first, num_tiles = ((left < TILES * TILE ? left : TILES * TILE) + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t tile = 0; tile < num_tiles; tile++)
            for (int64_t n = 0; n < TILE; n++) {
                int64_t row = first + tile * TILE + n;
                const ELEMENT *from = x + (row < rows ? row : rows - 1) * x_stride;
                float *to = tiles + tile * TILE * inputs + n;
                for (int64_t k = 0; k < inputs; k++) to[k * TILE] = LOAD(from[k]);
            }
        int64_t groups = (num_tiles + TILES_TOGETHER - 1) / TILES_TOGETHER;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t item = 0; item < panels * groups; item++) {
            int64_t panel = item / groups, begin = item % groups * TILES_TOGETHER;
            int64_t end = begin + TILES_TOGETHER < num_tiles ? begin + TILES_TOGETHER : num_tiles;
            int64_t width = outputs - panel * PANEL < PANEL ? outputs - panel * PANEL : PANEL;
            for (int64_t tile = begin; tile < end; tile++) {
                float sums[TILE * PANEL];
                NAME(multiply_tile)(tiles + tile * TILE * inputs, packed + panel * PANEL * inputs, inputs, sums);
                for (int64_t n = 0; n < TILE && first + tile * TILE + n < rows; n++) {
                    ELEMENT *to = out + (first + tile * TILE + n) * outputs + panel * PANEL;
                    const float *from = sums + n * PANEL;
                    if (bias == NULL)
                        for (int64_t i = 0; i < width; i++) to[i] = STORE(from[i]);
                    else
                        for (int64_t i = 0; i < width; i++) to[i] = STORE(from[i] + LOAD(bias[panel * PANEL + i]));
                }
            }
        }
    }
    free(tiles);
    return 0;
}

/* Attention of any layout. Query `row` looks at seen[row] tokens, with a window above zero at the last so many of them;
   the n-th lies in row contexts[starts[row] + n] of keys and values (rows, kv_heads, head_dim). head_dim must be a
   multiple of LANES. logsums (rows, heads): the log of its softmax's sums. Returns 0, or 1 if memory ran out. */
int NAME(exact_attention)(const ELEMENT *q, const ELEMENT *keys, const ELEMENT *values, const int64_t *contexts,
                          const int64_t *starts, const int64_t *seen, ELEMENT *out, float *logsums, int64_t rows,
                          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, int threads) {
    int64_t folded = heads / kv_heads, token_stride = kv_heads * head_dim, state_size = MIXED + head_dim, longest = 0;
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int64_t row = 0; row < rows; row++) longest = seen[row] > longest ? seen[row] : longest;
    int64_t room = folded * (head_dim + state_size + longest + TOKENS);
    float *workspace = malloc(sizeof(float) * (size_t)(room * threads));
    int64_t *places = malloc(sizeof(int64_t) * (size_t)((longest + TOKENS) * threads));
    if (workspace == NULL || places == NULL) {
        free(workspace);
        free(places);
        return 1;
    }
    /* Dealt out one by one: later tokens of a sequence have more to look at. */
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *queries = workspace + thread * room, *states = queries + folded * head_dim;
        float *scores = states + folded * state_size;
        int64_t *offsets = places + thread * (longest + TOKENS);
        for (int64_t row = thread; row < rows; row += threads) {
            int64_t first = window > 0 && seen[row] > window ? seen[row] - window : 0, count = seen[row] - first;
            for (int64_t i = 0; i < count; i++) offsets[i] = contexts[starts[row] + first + i] * token_stride;
            for (int64_t i = count; i % TOKENS != 0; i++) offsets[i] = offsets[count - 1];
            for (int64_t head = 0; head < kv_heads; head++) {
                const ELEMENT *own = q + (row * heads + head * folded) * head_dim;
                for (int64_t i = 0; i < folded * head_dim; i++) queries[i] = LOAD(own[i]) * scale;
                memset(states, 0, sizeof(float) * (size_t)(folded * state_size));
                for (int64_t n = 0; n < folded; n++) states[n * state_size + LARGEST] = -INFINITY;
#define ATTEND(size)                                                                                              \
    NAME(attend_own)(queries, keys + head * size, values + head * size, offsets, count, states, scores, folded, size)
                BY_HEAD_DIM(ATTEND);
#undef ATTEND
                for (int64_t n = 0; n < folded; n++) {
                    float *state = states + n * state_size, inverse = 1.0f / state[TOTAL];
                    int64_t at = row * heads + head * folded + n;
                    for (int64_t i = 0; i < head_dim; i++)
                        out[at * head_dim + i] = STORE(state[MIXED + i] * inverse);
                    logsums[at] = state[LARGEST] + logf(state[TOTAL]);
                }
            }
        }
    }
    free(workspace);
    free(places);
    return 0;
}

/* Of given tokens, one for each row of logits, what `draw` says of those that it draws. */
void NAME(token_logprobs)(const ELEMENT *logits, int64_t stride, int64_t rows, int64_t size, const float *temperatures,
                          const int64_t *tokens, float *logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = logits + row * stride;
        float inverse = temperatures[row] == 0.0f ? 1.0f : 1.0f / temperatures[row], largest;
        double total = NAME(normalizer)(from, size, inverse, &largest);
        logprobs[row] = logprob_of(LOAD(from[tokens[row]]), largest, inverse, total);
    }
}
