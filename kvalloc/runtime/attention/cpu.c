/* Attention of a few new tokens over one layer's kept entries and the tokens after them, on the CPU.

   Called by cpu.py, where the arguments are described; the Triton kernel in
   triton.py does the same on CUDA. Each thread reads an equal share of all entries of all
   segments (a segment is one row's KV head), once, a block at a time: as they are if they are
   float32, or halves that few rows ask for, else made float32 in a block that stays in the
   processor's cache. A softmax over what was read so far is, for each query row, the largest logit
   `most`, the sum of 2^(logit - most) `total` and the values weighted by the same, `summed`;
   logits are in units of log 2. What threads found of one segment is added in the end. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define WIDTH 16 /* numbers of a vector are filled up to a multiple of it */
#define BLOCK 64 /* entries read together; as many share a key scale */
#define SCALE_CHANNELS 64 /* channels of a value that share a scale */
#define MOST_ROWS 256
#define FEW_ROWS 8 /* for which halves are made float32 as they are read, four rows at a time */
#define LEAST_SHARE 256 /* entries that are worth a thread; also, so no share is empty */
#define LOWEST -1e38f
#define LOG2_E 1.44269504088896340736f
#define AHEAD 32768 /* bytes: what is read is fetched so far before */
#define PAGE 4096
#define LINE 64
#define INLINE static inline __attribute__((always_inline))

/* aligned(4): they are read from wherever an entry begins */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t lanes __attribute__((vector_size(32)));

/* Of codes it is how many bits they have. */
enum kind { FLOAT16 = 16, BFLOAT16, FLOAT32 = 32 };

/* Kept entries of one width. The same fields, in the same order, as `_Part` in cpu.py. */
typedef struct {
    const char *keys;             /* (n_entries, key_dim), or packed codes */
    const char *values;           /* (n_entries, value_dim), or packed codes and their scales */
    const uint16_t *key_scales;   /* (n_key_blocks, 2, key_dim) */
    int64_t key_kind, value_kind, scale_kind; /* scales of keys and values are of one kind */
    int64_t turned; /* 1: values are times Hadamard's matrix of value_dim, a power of two */
} part;

/* The same fields, in the same order, as `_Arguments` in cpu.py. */
typedef struct {
    const float *queries;         /* (n_segments, n_rows, key_dim) */
    const part *parts;
    const int64_t *pieces;        /* (n_segments, n_pieces, 4): start, end, first key scale, part;
                                     of each segment those of turned values come first */
    const void *keys;             /* (n_segments, room, key_dim), n_following of the room */
    const void *values;           /* (n_segments, room, value_dim) */
    const int64_t *starts;        /* (batch,): first of each row that followed, or NULL */
    const float *sinks;           /* (n_kv_heads, group), or NULL */
    float *output;                /* (batch, n_new, n_kv_heads * group, value_dim) */
    int64_t n_segments, n_pieces, n_kv_heads, n_rows, n_new, n_following, room;
    int64_t key_dim, value_dim;
    int64_t following_kind, threads;
    float scaling, softcap; /* softcap is 0 where there is none */
} arguments;

/* What one thread works with. */
typedef struct {
    float *queries; /* (n_rows, key_width), scaled, zeros behind key_dim */
    float *keys, *values; /* (BLOCK, width): a block as float32 */
    float *steps, *leasts; /* (key_width,): of the block's keys */
    int64_t key_width, value_width;
} scratch;

/* One segment's softmax over what one thread read. */
typedef struct {
    float *most, *total, *summed; /* (n_rows,), (n_rows,), (n_rows, value_width) */
} softmax;

/* Entries that stand together. */
typedef struct {
    const char *keys, *values;
    const uint16_t *key_scales;
    int64_t count;
    int key_kind, value_kind, scale_kind;
    int turned;
    int following; /* 1: of the tokens that followed, which new tokens need not all see */
} span;

static inline vec all(float number) { return number - (vec){0}; }

#if defined(__clang__)
#define LANES_OF(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define LANES_OF(x, y, ...) __builtin_shuffle(x, y, (lanes){__VA_ARGS__})
#endif

static inline eight folded(vec x) {
    eight parts[2] = {{0}, {0}};
    memcpy(parts, &x, sizeof x);
    return parts[0] + parts[1];
}

/* Write the sums of four vectors. */
INLINE void sums_of(const vec *x, float *out) {
    eight a = folded(x[0]), b = folded(x[1]), c = folded(x[2]), d = folded(x[3]);
    a = LANES_OF(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + LANES_OF(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    c = LANES_OF(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + LANES_OF(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    a = LANES_OF(a, c, 0, 1, 8, 9, 4, 5, 12, 13) + LANES_OF(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
    a += LANES_OF(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    for (int i = 0; i < 4; i++) out[i] = a[i];
}

static inline float sum_of(vec x) {
    float sums[4];
    sums_of((vec[4]){x}, sums);
    return sums[0];
}

/* 2^x for x <= 0, to 1e-7 of it; 0 below the smallest normal number. */
static inline vec power_of_two(vec x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded */
    ivec enough = x >= all(-126.0f);
    vec shifted = x + all(shift), rest = x - (shifted - all(shift));
    const float series[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                            5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f,
                            1.0f};
    vec found = all(0.0f);
    for (int i = 0; i < 7; i++) found = found * rest + all(series[i]);
    ivec exponent = ((ivec)shifted - 0x4B400000 + 127) << 23;
    vec product = found * (vec)exponent;
    return (vec)((ivec)product & (enough | (x != x)));
}

/* Numbers of half precision, codes of 8 bits and fewer: as float32. */

static inline vec from_bfloat16(half_vec x) {
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}

static inline vec from_float16(half_vec x) {
#ifdef __F16C__
#ifdef __AVX512F__
    return (vec)_mm512_cvtph_ps((__m256i)x);
#else
    return (vec)_mm256_cvtph_ps((__m128i)x);
#endif
#else
    uvec wide = __builtin_convertvector(x, uvec);
    uvec special = (uvec)((wide & 0x7C00) == 0x7C00) & 0x7F800000;
    vec size = (vec)((wide & 0x7FFF) << 13) * all(0x1p112f);
    return (vec)((uvec)size | special | ((wide & 0x8000) << 16));
#endif
}

static inline float one_from_float16(const uint16_t *x) {
    half_vec many = {0};
    uint16_t bits;
    memcpy(&bits, x, sizeof bits);
    many[0] = bits;
    return from_float16(many)[0];
}

static inline float one_from_half(int kind, const uint16_t *x) {
    uint16_t bits;
    if (kind == FLOAT16) return one_from_float16(x);
    memcpy(&bits, x, sizeof bits);
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
}

static inline int bits_of(int kind) { return kind == BFLOAT16 ? 16 : kind; }

/* Codes of 5 and 3 bits are in two planes: the lowest 4 or 2 bits of all, then the highest bits. */
static inline int low_bits(int kind) { return kind == 5 ? 4 : kind == 3 ? 2 : bits_of(kind); }

static inline int64_t low_bytes(int kind, int64_t dim) { return (low_bits(kind) * dim + 7) / 8; }

static inline int64_t code_bytes(int kind, int64_t dim) {
    return low_bytes(kind, dim) + (low_bits(kind) < bits_of(kind) ? (dim + 7) / 8 : 0);
}

/* Codes of turned values are around 0: their blocks have a scale and no minimum. */
static inline int64_t value_bytes(int kind, int turned, int64_t dim) {
    int64_t scales = (dim + SCALE_CHANNELS - 1) / SCALE_CHANNELS;
    return code_bytes(kind, dim) + (kind < FLOAT16 ? (turned ? 2 : 4) * scales : 0);
}

/* Compilers make a vector of bytes wider one by one. */
static inline uvec from_bytes(const char *x) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
#else
    return __builtin_convertvector(*(const byte_vec *)x, uvec);
#endif
}

/* Codes of a vector: the low bits of all, and where `high` is not NULL one more bit of each. */
INLINE vec from_codes(const char *low, int bits, const char *high) {
    uvec numbers, many = {0}, one = {0};
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    if (bits == 8) return __builtin_convertvector((ivec)from_bytes(low), vec);
    uint32_t words[2] = {0}; /* a vector's codes of 4 bits are in two words at most */
    memcpy(words, low, LANES * bits / 8);
    uvec second = (uvec)(numbers * (unsigned)bits >= 32);
    many = ((words[0] + many) & ~second) | ((words[1] + many) & second);
    many = (many >> (numbers * (unsigned)bits & 31)) & ((1u << bits) - 1);
    if (high) {
        uint32_t last = 0;
        memcpy(&last, high, LANES / 8);
        one = last + one;
        many |= (one >> numbers & 1) << bits;
    }
    return __builtin_convertvector((ivec)many, vec);
}

/* A vector of a row of `dim` channels from `first` on; fewer are left at its end. */
INLINE vec channels(const char *row, int kind, int64_t first, int64_t dim) {
    char own[4 * LANES] = {0}, last[LANES / 8] = {0};
    int bits = low_bits(kind);
    int64_t left = dim - first;
    const char *high = bits < bits_of(kind) ? row + low_bytes(kind, dim) + first / 8 : 0;
    row += first / 8 * bits;
    if (left < LANES) {
        if (left > 0) memcpy(own, row, (bits * left + 7) / 8);
        if (high && left > 0) memcpy(last, high, (left + 7) / 8);
        if (high) high = last;
        row = own;
    }
    switch (kind) {
    case FLOAT32: return *(const vec *)row;
    case BFLOAT16: return from_bfloat16(*(const half_vec *)row);
    case FLOAT16: return from_float16(*(const half_vec *)row);
    default: return from_codes(row, bits, high);
    }
}

/* Fetch what will be read after what is read now, so many bytes: a line of each of several pages at
   a time, for the processor itself reads ahead in each page, and in more of them faster. */
INLINE void fetch(const char *now, int64_t bytes) {
    const uintptr_t pages = AHEAD / PAGE, step = pages * LINE;
    uintptr_t from = ((uintptr_t)now + step - 1) / step * step;
    for (; from < (uintptr_t)now + bytes; from += step) {
        const char *next = (char *)((from / AHEAD + 1) * AHEAD + from % AHEAD / pages);
        for (uintptr_t page = 0; page < pages; page++) __builtin_prefetch(next + page * PAGE);
    }
}

static inline int64_t width_of(int64_t dim) { return (dim + WIDTH - 1) / WIDTH * WIDTH; }

/* Rows of `width` floats each, zeros behind `dim`. Codes of keys have `steps` and `leasts`, those of
   values, where there are none, scale and minimum of each 64 channels behind a row's codes, or a
   scale alone if they are turned. */
INLINE void make_floats(int kind, const char *rows, int64_t row_bytes, int64_t n, int64_t dim,
                        int64_t width, const float *steps, const float *leasts, int scale_kind,
                        int turned, float *out) {
    const char *scales = rows + code_bytes(kind, dim);
    for (int64_t i = 0; i < n; i++, rows += row_bytes, scales += row_bytes, out += width) {
        fetch(rows, row_bytes);
        for (int64_t first = 0; first < width; first += SCALE_CHANNELS) {
            int64_t end = first + SCALE_CHANNELS < width ? first + SCALE_CHANNELS : width;
            vec step = all(1.0f), least = all(0.0f);
            if (kind < FLOAT16 && !steps) {
                int64_t block = first / SCALE_CHANNELS;
                const uint16_t *own = (const uint16_t *)(scales + block * (turned ? 2 : 4));
                step = all(one_from_half(scale_kind, own));
                if (turned) least = step * all(-0.5f * ((1 << bits_of(kind)) - 1));
                else least = all(one_from_half(scale_kind, own + 1));
            }
            for (int64_t d = first; d < end; d += LANES) {
                if (kind < FLOAT16 && steps)
                    step = *(const vec *)(steps + d), least = *(const vec *)(leasts + d);
                vec x = channels(rows, kind, d, dim);
                if (kind < FLOAT16) x = x * step + least;
                *(vec *)(out + d) = x;
            }
        }
    }
}

/* With the kind known, and the width where it is a common one: nothing is decided in the loop. */
static void as_floats(int kind, const char *rows, int64_t row_bytes, int64_t n, int64_t dim,
                      int64_t width, const float *steps, const float *leasts, int scale_kind,
                      int turned, float *out) {
#define SIZED(kind, dim, width) \
    make_floats(kind, rows, row_bytes, n, dim, width, steps, leasts, scale_kind, turned, out)
#define OF(kind) \
    case kind: \
        if (dim == 64) SIZED(kind, 64, 64); \
        else if (dim == 128) SIZED(kind, 128, 128); \
        else SIZED(kind, dim, width); \
        break;
    switch (kind) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(8) OF(FLOAT16) OF(BFLOAT16) OF(FLOAT32) }
}

static void keys_as_floats(const span *of, int64_t first, int64_t n, int64_t dim, scratch *own) {
    int64_t bytes = code_bytes(of->key_kind, dim), width = own->key_width;
    const float *steps = 0, *leasts = 0;
    if (of->key_kind < FLOAT16) {
        const char *scales = (const char *)(of->key_scales + first / BLOCK * 2 * dim);
        as_floats(of->scale_kind, scales, 0, 1, dim, width, 0, 0, 0, 0, own->steps);
        as_floats(of->scale_kind, scales + 2 * dim, 0, 1, dim, width, 0, 0, 0, 0,
                  own->leasts);
        steps = own->steps, leasts = own->leasts;
    }
    as_floats(of->key_kind, of->keys + first * bytes, bytes, n, dim, width, steps, leasts, 0, 0,
              own->keys);
}

/* A vector of a row that has as many numbers as its width. */
INLINE vec at(int kind, const char *row, int64_t d) {
    if (kind == FLOAT32) return *(const vec *)(row + 4 * d);
    half_vec own = *(const half_vec *)(row + 2 * d);
    return kind == FLOAT16 ? from_float16(own) : from_bfloat16(own);
}

/* Products of some query rows, at most 4, with some keys, at most 4. */
INLINE void products(int rows, int entries, int kind, const float *queries, float (*logits)[BLOCK],
                     const char *keys, int64_t i, int64_t width) {
    vec found[4][4] = {0};
    for (int64_t d = 0; d < width; d += LANES)
        for (int e = 0; e < entries; e++) {
            vec key = at(kind, keys + (i + e) * width * bits_of(kind) / 8, d);
            for (int r = 0; r < rows; r++)
                found[r][e] += key * *(const vec *)(queries + r * width + d);
        }
    for (int r = 0; r < rows; r++)
        if (entries == 4) sums_of(found[r], logits[r] + i);
        else for (int e = 0; e < entries; e++) logits[r][i + e] = sum_of(found[r][e]);
}

/* Products of some query rows, at most 4, with keys: logits[row][entry]; what comes behind keys that
   are `stored`, 1 or 0, is fetched. */
INLINE void some_logits(int rows, int kind, const float *queries, float (*logits)[BLOCK],
                        const char *keys, int64_t n, int64_t width, int64_t stored) {
    const int together = LANES == 8 && rows > 3 ? 2 : 4; /* as registers are there for */
    int64_t i = 0, bytes = width * bits_of(kind) / 8;
    for (; i + together <= n; i += together) {
        fetch(keys + i * bytes, stored * together * bytes);
        products(rows, together, kind, queries, logits, keys, i, width);
    }
    for (; i < n; i++) products(rows, 1, kind, queries, logits, keys, i, width);
}

/* Add some channels, so many vectors, of weighted values to some rows, at most 4. */
INLINE void add_channels(int rows, int vecs, int kind, float *summed, float (*weights)[BLOCK],
                         const char *values, int64_t n, int64_t width, int64_t first,
                         int64_t stored) {
    int64_t row_bytes = width * bits_of(kind) / 8, bytes = vecs * LANES * bits_of(kind) / 8;
    const char *part = values + n * first * bits_of(kind) / 8;
    vec own[4][4], x[4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            own[r][v] = *(vec *)(summed + r * width + first + v * LANES);
    for (int64_t i = 0; i < n; i++, part += bytes) {
        fetch(part, stored * bytes); /* all channels together those of all values */
        for (int v = 0; v < vecs; v++) x[v] = at(kind, values + i * row_bytes, first + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) own[r][v] += weights[r][i] * x[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            *(vec *)(summed + r * width + first + v * LANES) = own[r][v];
}

/* Add weighted values to some rows, at most 4. */
INLINE void some_values(int rows, int kind, float *summed, float (*weights)[BLOCK],
                        const char *values, int64_t n, int64_t width, int64_t stored) {
    const int vecs = LANES == 8 && rows > 3 ? 2 : 4; /* as registers are there for */
    int64_t first = 0;
    for (; first + vecs * LANES <= width; first += vecs * LANES)
        add_channels(rows, vecs, kind, summed, weights, values, n, width, first, stored);
    for (; first < width; first += WIDTH)
        add_channels(rows, WIDTH / LANES, kind, summed, weights, values, n, width, first, stored);
}

/* Some rows after the other, with their number known, the kind, and a common width. */
#define SOME(some, rows, kind, width, of_rows, logits, entries, stored) \
    some(rows, kind, of_rows + r * width, logits + r, entries, n, width, r ? 0 : stored)
#define ROWS_OF(some, kind, width, ...) \
    for (int64_t r = 0; r < n_rows; r += 4) { \
        if (n_rows - r > 3) SOME(some, 4, kind, width, __VA_ARGS__); \
        else if (n_rows - r > 2) SOME(some, 3, kind, width, __VA_ARGS__); \
        else if (n_rows - r > 1) SOME(some, 2, kind, width, __VA_ARGS__); \
        else SOME(some, 1, kind, width, __VA_ARGS__); \
    }
#define WIDTHS_OF(some, kind, width, ...) \
    if (width == 64) ROWS_OF(some, kind, 64, __VA_ARGS__) \
    else if (width == 128) ROWS_OF(some, kind, 128, __VA_ARGS__) \
    else ROWS_OF(some, kind, width, __VA_ARGS__)
#define ALL_ROWS(some, kind, ...) \
    if (kind == FLOAT16) WIDTHS_OF(some, FLOAT16, __VA_ARGS__) \
    else if (kind == BFLOAT16) WIDTHS_OF(some, BFLOAT16, __VA_ARGS__) \
    else WIDTHS_OF(some, FLOAT32, __VA_ARGS__)

/* Logits as the model has them, and minus infinity where a row does not see an entry. */
static void finish_logits(
    const arguments *given, int64_t segment, const span *of, int64_t first, int64_t n,
    float (*logits)[BLOCK]) {
    int64_t start = given->starts ? given->starts[segment / given->n_kv_heads] : 0;
    for (int64_t r = 0; r < given->n_rows; r++) {
        if (given->softcap > 0.0f)
            for (int64_t i = 0; i < n; i++)
                logits[r][i] = given->softcap * LOG2_E * tanhf(logits[r][i] / given->softcap);
        if (of->following && (start || given->n_new > 1)) {
            int64_t place = given->n_following - given->n_new + r % given->n_new;
            for (int64_t i = 0; i < n; i++) {
                int64_t column = first + i;
                if (column > place || (column < start && column != place))
                    logits[r][i] = -INFINITY;
            }
        }
        for (int64_t i = n; i % LANES; i++) logits[r][i] = -INFINITY;
    }
}

/* Turn a block's logits into weights, and bring what was summed before to the new largest one. */
static void weigh(const arguments *given, int64_t n, float (*logits)[BLOCK], softmax *to,
                  int64_t width) {
    for (int64_t r = 0; r < given->n_rows; r++) {
        vec highest = all(to->most[r]), total = all(0.0f);
        ivec any = {0};
        for (int64_t i = 0; i < n; i += LANES) {
            vec x = *(const vec *)(logits[r] + i);
            ivec more = x > highest;
            any |= more;
            highest = (vec)(((ivec)x & more) | ((ivec)highest & ~more));
        }
        float most = to->most[r];
        if (sum_of(__builtin_convertvector(any, vec)) < 0.0f) {
            for (int lane = 0; lane < LANES; lane++)
                most = highest[lane] > most ? highest[lane] : most;
            float factor = exp2f(to->most[r] - most);
            to->most[r] = most;
            to->total[r] *= factor;
            for (int64_t d = 0; d < width; d++) to->summed[r * width + d] *= factor;
        }
        for (int64_t i = 0; i < n; i += LANES) {
            vec weights = power_of_two(*(const vec *)(logits[r] + i) - all(most));
            *(vec *)(logits[r] + i) = weights;
            total += weights;
        }
        to->total[r] += sum_of(total);
    }
}

/* Add the entries from `first` to `end` of a span to a softmax. */
static void add_span(const arguments *given, int64_t segment, const span *of, int64_t first,
                     int64_t end, scratch *own, softmax *to) {
    float logits[MOST_ROWS][BLOCK];
    int64_t key_dim = given->key_dim, value_dim = given->value_dim, n_rows = given->n_rows;
    int64_t key_width = own->key_width, value_width = own->value_width;
    int least = n_rows > FEW_ROWS ? FLOAT32 : FLOAT16; /* of the kinds that are read in place */
    int keys_as_they_are = of->key_kind >= least && key_dim == key_width;
    int values_as_they_are = of->value_kind >= least && value_dim == value_width;
    int key_kind = keys_as_they_are ? of->key_kind : FLOAT32;
    int value_kind = values_as_they_are ? of->value_kind : FLOAT32;
    int64_t key_bytes = code_bytes(of->key_kind, key_dim);
    int64_t row_bytes = value_bytes(of->value_kind, of->turned, value_dim);
    while (first < end) {
        int64_t stop = first / BLOCK * BLOCK + BLOCK, n = (stop < end ? stop : end) - first;
        const char *keys = of->keys + first * key_bytes, *values = of->values + first * row_bytes;
        if (!keys_as_they_are) {
            keys_as_floats(of, first, n, key_dim, own);
            keys = (const char *)own->keys;
        }
        ALL_ROWS(some_logits, key_kind, key_width, own->queries, logits, keys, keys_as_they_are)
        finish_logits(given, segment, of, first, n, logits);
        weigh(given, n, logits, to, value_width);
        if (!values_as_they_are) {
            as_floats(of->value_kind, values, row_bytes, n, value_dim, value_width, 0, 0,
                      of->scale_kind, of->turned, own->values);
            values = (const char *)own->values;
        }
        ALL_ROWS(some_values, value_kind, value_width, to->summed, logits, values,
                 values_as_they_are)
        first += n;
    }
}

/* A piece of what is kept of a segment. */
static span kept_span(const arguments *given, int64_t segment, int64_t piece) {
    const int64_t *own = given->pieces + (segment * given->n_pieces + piece) * 4;
    const part *kept = given->parts + own[3];
    span out = {
        .keys = kept->keys + own[0] * code_bytes(kept->key_kind, given->key_dim),
        .values = kept->values
            + own[0] * value_bytes(kept->value_kind, kept->turned, given->value_dim),
        .count = own[1] - own[0],
        .key_kind = (int)kept->key_kind,
        .value_kind = (int)kept->value_kind,
        .scale_kind = (int)kept->scale_kind,
        .turned = (int)kept->turned,
    };
    if (kept->key_scales) out.key_scales = kept->key_scales + own[2] * 2 * given->key_dim;
    return out;
}

/* The tokens that followed. */
static span following_span(const arguments *given, int64_t segment) {
    int64_t first = segment * given->room;
    return (span){
        .keys = (const char *)given->keys
            + first * code_bytes(given->following_kind, given->key_dim),
        .values = (const char *)given->values
            + first * code_bytes(given->following_kind, given->value_dim),
        .count = given->n_following,
        .key_kind = (int)given->following_kind,
        .value_kind = (int)given->following_kind,
        .following = 1,
    };
}

static int64_t entries_of(const arguments *given, int64_t segment) {
    const int64_t *own = given->pieces + segment * given->n_pieces * 4;
    int64_t count = given->n_following;
    for (int64_t piece = 0; piece < given->n_pieces; piece++, own += 4) count += own[1] - own[0];
    return count;
}

/* A segment's queries, scaled; logits are in units of log 2 unless they are capped first. */
static void ask(const arguments *given, int64_t segment, scratch *own) {
    float scaling = given->scaling * (given->softcap > 0.0f ? 1.0f : LOG2_E);
    const float *from = given->queries + segment * given->n_rows * given->key_dim;
    memset(own->queries, 0, sizeof(float) * given->n_rows * own->key_width);
    for (int64_t r = 0; r < given->n_rows; r++)
        for (int64_t d = 0; d < given->key_dim; d++)
            own->queries[r * own->key_width + d] = scaling * from[r * given->key_dim + d];
}

/* Where thread p keeps what it found of segment s: number p + s, which no other pair has, since
   the shares of threads follow each other as segments do. */
static softmax found_by(const arguments *given, float *found, int64_t number) {
    int64_t width = width_of(given->value_dim), size = given->n_rows * (2 + width);
    float *own = found + number * size;
    return (softmax){own, own + given->n_rows, own + 2 * given->n_rows};
}

/* Multiply rows by Hadamard's matrix over the root of its size, which is its own inverse. */
static void turn(float *rows, int64_t n_rows, int64_t dim, int64_t width) {
    float size = 1.0f / sqrtf((float)dim);
    for (float *row = rows; row < rows + n_rows * width; row += width) {
        for (int64_t step = 1; step < dim; step *= 2)
            for (int64_t first = 0; first < dim; first += 2 * step)
                for (int64_t d = first; d < first + step; d++) {
                    float low = row[d], high = row[d + step];
                    row[d] = low + high, row[d + step] = low - high;
                }
        for (int64_t d = 0; d < dim; d++) row[d] *= size;
    }
}

/* One thread's share: the entries from `start` to `end`, counted over all segments. */
static void read_share(const arguments *given, int64_t thread, int64_t start, int64_t end,
                       scratch *own, float *found) {
    int64_t before = 0;
    for (int64_t segment = 0; segment < given->n_segments && before < end; segment++) {
        int64_t count = entries_of(given, segment);
        if (before + count > start) {
            softmax to = found_by(given, found, thread + segment);
            for (int64_t r = 0; r < given->n_rows; r++) to.most[r] = LOWEST, to.total[r] = 0.0f;
            memset(to.summed, 0, sizeof(float) * given->n_rows * own->value_width);
            ask(given, segment, own);
            int64_t place = before;
            int turned = 0; /* whether what is summed up is */
            for (int64_t piece = 0; piece <= given->n_pieces; piece++) {
                span from = piece < given->n_pieces ? kept_span(given, segment, piece)
                                                    : following_span(given, segment);
                int64_t first = start - place, last = end - place;
                first = first < 0 ? 0 : first;
                last = last < from.count ? last : from.count;
                if (turned && !from.turned)
                    turn(to.summed, given->n_rows, given->value_dim, own->value_width), turned = 0;
                if (first < last) {
                    add_span(given, segment, &from, first, last, own, &to);
                    turned = from.turned;
                }
                place += from.count;
            }
        }
        before += count;
    }
}

/* A segment's answer from what all threads found. */
static void answer(const arguments *given, int64_t segment, int64_t first, int64_t last,
                   float *found) {
    int64_t group = given->n_rows / given->n_new, dim = given->value_dim, width = width_of(dim);
    int64_t batch_row = segment / given->n_kv_heads, head = segment % given->n_kv_heads;
    for (int64_t r = 0; r < given->n_rows; r++) {
        int64_t member = r / given->n_new, token = r % given->n_new;
        float sink = given->sinks ? LOG2_E * given->sinks[head * group + member] : LOWEST;
        float most = sink;
        for (int64_t thread = first; thread <= last; thread++) {
            float own = found_by(given, found, thread + segment).most[r];
            most = own > most ? own : most;
        }
        float total = given->sinks ? exp2f(sink - most) : 0.0f;
        float *out = given->output;
        out += ((batch_row * given->n_new + token) * given->n_kv_heads * group + head * group
                + member) * dim;
        memset(out, 0, sizeof(float) * dim);
        for (int64_t thread = first; thread <= last; thread++) {
            softmax own = found_by(given, found, thread + segment);
            float factor = exp2f(own.most[r] - most);
            total += factor * own.total[r];
            for (int64_t d = 0; d < dim; d++) out[d] += factor * own.summed[r * width + d];
        }
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
    }
}

/* What all threads of a call share. */
typedef struct {
    const arguments *given;
    float *memory, *found;
    int64_t all_entries, threads;
} work;

/* The functions of the OpenMP library that torch itself has loaded: a second one beside it would
   have its own threads, and both wait by spinning. Not linked, so that none need be there. */
static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    void (*barrier)(void); /* GOMP_barrier */
    int (*thread)(void), (*threads)(void); /* omp_get_thread_num, omp_get_num_threads */
} openmp;

void use_openmp(void *parallel, void *barrier, void *thread, void *threads) {
    memcpy(&openmp.parallel, &parallel, sizeof parallel);
    memcpy(&openmp.barrier, &barrier, sizeof barrier);
    memcpy(&openmp.thread, &thread, sizeof thread);
    memcpy(&openmp.threads, &threads, sizeof threads);
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
const char source_digest[] = TEXT(SOURCE_DIGEST);

static int64_t floats_of_thread(const arguments *given) {
    int64_t key_width = width_of(given->key_dim), value_width = width_of(given->value_dim);
    return given->n_rows * key_width + BLOCK * (key_width + value_width) + 2 * key_width;
}

static scratch scratch_of(const arguments *given, float *memory, int64_t thread) {
    int64_t key_width = width_of(given->key_dim), value_width = width_of(given->value_dim);
    scratch mine = {.key_width = key_width, .value_width = value_width};
    mine.queries = memory + thread * floats_of_thread(given);
    mine.keys = mine.queries + given->n_rows * key_width;
    mine.values = mine.keys + BLOCK * key_width;
    mine.steps = mine.values + BLOCK * value_width;
    mine.leasts = mine.steps + key_width;
    return mine;
}

static void run_thread(void *data) {
    const work *all = data;
    const arguments *given = all->given;
    int together = all->threads > 1;
    int64_t thread = together ? openmp.thread() : 0, n_threads = together ? openmp.threads() : 1;
    scratch mine = scratch_of(given, all->memory, thread);
    int64_t all_entries = all->all_entries;
    int64_t start = all_entries * thread / n_threads;
    int64_t end = all_entries * (thread + 1) / n_threads;
    if (start < end) read_share(given, thread, start, end, &mine, all->found);
    if (together) openmp.barrier();
    int64_t before = 0, first = 0;
    for (int64_t s = 0; s < given->n_segments; s++) {
        int64_t after = before + entries_of(given, s), last = first - 1;
        if (after > before) { /* else nobody read it, and its softmax is that of nothing */
            while (all_entries * (first + 1) / n_threads <= before) first++;
            for (last = first; all_entries * (last + 1) / n_threads < after;) last++;
        }
        if (s % n_threads == thread) answer(given, s, first, last, all->found);
        before = after;
    }
}

/* Returns 0, or 1 if there is no memory to work with. */
int attend(const arguments *given) {
    work all = {.given = given, .threads = openmp.parallel ? given->threads : 1};
    for (int64_t s = 0; s < given->n_segments; s++) all.all_entries += entries_of(given, s);
    int64_t useful = all.all_entries / LEAST_SHARE;
    all.threads = useful < 1 ? 1 : useful < all.threads ? useful : all.threads;
    int64_t own = all.threads * floats_of_thread(given);
    int64_t one = given->n_rows * (2 + width_of(given->value_dim));
    all.memory = malloc(sizeof(float) * (own + (all.threads + given->n_segments) * one));
    if (!all.memory) return 1;
    all.found = all.memory + own;
    if (all.threads > 1) openmp.parallel(run_thread, &all, (unsigned)all.threads, 0);
    else run_thread(&all);
    free(all.memory);
    return 0;
}
