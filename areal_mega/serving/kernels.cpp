// Kernels of the embedded server, for any CPU; products are in products.cpp.
//
// Built by native.py, called by ops.py. Plain pointers in, nothing allocated for the caller, no error possible: what callers must keep is
// asserted there. Arithmetic is in fp32, results are rounded once. A row's result never depends on the other rows of a call.

#include "kernels.h"

namespace {

// ---- Norm, rotation, activation

template <class T> void add_norm(T* x, const T* delta, const T* weight, float eps, T* out, int64_t rows, int64_t width, int threads) {
    share(rows * width > 16384, threads, [=](int64_t me, int64_t all) {
        for (int64_t t = rows * me / all; t < rows * (me + 1) / all; ++t) {
            T* row = x + t * width;
            float squares = 0;
            if (delta) {
                const T* d = delta + t * width;
                #pragma omp simd reduction(+ : squares)
                for (int64_t i = 0; i < width; ++i) { down(up(row[i]) + up(d[i]), row[i]); const float v = up(row[i]); squares += v * v; }
            } else {
                #pragma omp simd reduction(+ : squares)
                for (int64_t i = 0; i < width; ++i) { const float v = up(row[i]); squares += v * v; }
            }
            const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
            T* o = out + t * width;
            #pragma omp simd
            for (int64_t i = 0; i < width; ++i) down(up(row[i]) * scale * up(weight[i]), o[i]);
        }
    });
}

template <class T> void silu_mul(const T* both, T* out, int64_t rows, int64_t width, int threads) {
    share(rows * width > 8192, threads, [=](int64_t me, int64_t all) {
        const int64_t total = rows * width;
        for (int64_t at = total * me / all, end = total * (me + 1) / all; at < end;) {
            const int64_t t = at / width, first = at % width, count = std::min(width - first, end - at);
            const T *gate = both + 2 * t * width + first, *value = gate + width;
            T* o = out + at;
            #pragma omp simd
            for (int64_t i = 0; i < count; ++i) { const float g = up(gate[i]); down(g / (1.0f + expo(-g)) * up(value[i]), o[i]); }
            at += count;
        }
    });
}

struct Heads { int64_t query, kv, dim, rotary; };
struct Slots { int64_t capacity, key_dim, value_dim, value_step, kv; };  // of one layer: [rows, kv, capacity, dim], steps in elements

// Norm (optional) and rotation of queries and keys, by cosines and sines per token; queries to q, keys and values to the cache.
template <class T> void place(const T* qkv, const T* norm, float eps, const T* cosine, const T* sine, const int64_t* positions,
                              const int64_t* rows, int64_t count, Heads h, T* q, T* keys, T* values, int64_t capacity, int threads) {
    share(count * h.query * h.dim > 8192, threads, [=](int64_t me, int64_t all) {
        float x[1024];  // dim <= 1024, asserted by the caller
        const int64_t half = h.rotary / 2;
        for (int64_t t = count * me / all; t < count * (me + 1) / all; ++t) {
            const T *c = cosine + t * h.rotary, *s = sine + t * h.rotary;
            const T* token = qkv + t * (h.query + 2 * h.kv) * h.dim;
            for (int64_t head = 0; head < h.query + h.kv; ++head) {
                const T* in = token + head * h.dim;
                for (int64_t i = 0; i < h.dim; ++i) x[i] = up(in[i]);
                if (norm) {
                    float squares = 0;
                    #pragma omp simd reduction(+ : squares)
                    for (int64_t i = 0; i < h.dim; ++i) squares += x[i] * x[i];
                    const float scale = 1.0f / std::sqrt(squares / float(h.dim) + eps);
                    for (int64_t i = 0; i < h.dim; ++i) x[i] *= scale * up(norm[head * h.dim + i]);
                }
                T* out = head < h.query ? q + (t * h.query + head) * h.dim
                                        : keys + ((rows[t] * h.kv + head - h.query) * capacity + positions[t]) * h.dim;
                for (int64_t i = 0; i < half; ++i) {
                    down(x[i] * up(c[i]) + x[i + half] * up(s[i]), out[i]);
                    down(x[i + half] * up(c[i + half]) + x[i] * up(s[i + half]), out[i + half]);
                }
                for (int64_t i = h.rotary; i < h.dim; ++i) down(x[i], out[i]);
            }
            for (int64_t head = 0; head < h.kv; ++head)
                std::memcpy(values + ((rows[t] * h.kv + head) * capacity + positions[t]) * h.dim,
                            token + (h.query + h.kv + head) * h.dim, size_t(h.dim) * sizeof(T));
        }
    });
}

// ---- Attention of every token to its row of the cache, up to its own position (online softmax, arXiv:1805.02867)

constexpr int64_t BLOCK = 64, QUERIES = 32;

#ifdef __AVX512F__
inline __m512 wide(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 wide(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

// Element i of the result is the sum of s[i].
inline __m512 sums_of(const __m512* s) {
    __m512 quads[4];
    #pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(s[4 * i], s[4 * i + 1]), _mm512_unpackhi_ps(s[4 * i], s[4 * i + 1]));
        const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(s[4 * i + 2], s[4 * i + 3]), _mm512_unpackhi_ps(s[4 * i + 2], s[4 * i + 3]));
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    const __m512 e = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    const __m512 f = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(e, f, 0x88), _mm512_shuffle_f32x4(e, f, 0xdd));
}

template <int64_t DIM, class T> inline __m512 product_of(const T* q, const T* k) {
    __m512 sum = _mm512_setzero_ps();
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2) {
        #pragma GCC unroll 8
        for (int64_t i = 0; i < DIM; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(q + i), (__m512bh)_mm512_loadu_si512(k + i));
        return sum;
    }
#endif
    #pragma GCC unroll 8
    for (int64_t i = 0; i < DIM; i += 16) sum = _mm512_fmadd_ps(wide(q + i), wide(k + i), sum);
    return sum;
}
#endif

// w[j] = scale * (q . k[j]) for the n <= BLOCK keys of a block. DIM is dim, or 0 for any.
template <class T, int64_t DIM> void score(const T* q, const T* k, int64_t n, int64_t dim, float scale, float* w) {
#ifdef __AVX512F__
    if constexpr (DIM > 0) {
        for (int64_t j = 0; j < n; j += 16) {
            __m512 s[16];
            #pragma GCC unroll 16
            for (int64_t i = 0; i < 16; ++i) s[i] = product_of<DIM>(q, k + std::min(j + i, n - 1) * DIM);
            _mm512_storeu_ps(w + j, _mm512_mul_ps(sums_of(s), _mm512_set1_ps(scale)));
        }
        return;
    }
#endif
    for (int64_t j = 0; j < n; ++j) {
        float dot = 0;
        const T* b = k + j * dim;
        #pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < dim; ++i) dot += up(q[i]) * up(b[i]);
        w[j] = dot * scale;
    }
}

// o = o * keep + sum over j of w[j] * v[j]; values lie `step` apart.
template <class T, int64_t WIDTH> void mix(const float* w, const T* v, int64_t n, int64_t width, int64_t step, float keep, float* o) {
#ifdef __AVX512F__
    if constexpr (WIDTH > 0) {
        constexpr int64_t PARTS = WIDTH / 16;
        __m512 even[PARTS], odd[PARTS];  // two chains of sums, to hide the latency of each
        #pragma GCC unroll 8
        for (int64_t i = 0; i < PARTS; ++i) even[i] = _mm512_mul_ps(wide(o + 16 * i), _mm512_set1_ps(keep)), odd[i] = _mm512_setzero_ps();
        int64_t j = 0;
        for (; j + 1 < n; j += 2) {
            const __m512 a = _mm512_set1_ps(w[j]), b = _mm512_set1_ps(w[j + 1]);
            #pragma GCC unroll 8
            for (int64_t i = 0; i < PARTS; ++i) {
                even[i] = _mm512_fmadd_ps(a, wide(v + j * step + 16 * i), even[i]);
                odd[i] = _mm512_fmadd_ps(b, wide(v + (j + 1) * step + 16 * i), odd[i]);
            }
        }
        if (j < n)
            for (int64_t i = 0; i < PARTS; ++i) even[i] = _mm512_fmadd_ps(_mm512_set1_ps(w[j]), wide(v + j * step + 16 * i), even[i]);
        for (int64_t i = 0; i < PARTS; ++i) _mm512_storeu_ps(o + 16 * i, _mm512_add_ps(even[i], odd[i]));
        return;
    }
#endif
    for (int64_t i = 0; i < width; ++i) o[i] *= keep;
    for (int64_t j = 0; j < n; ++j) {
        const float by = w[j];
        const T* b = v + j * step;
        #pragma omp simd
        for (int64_t i = 0; i < width; ++i) o[i] += by * up(b[i]);
    }
}

// The queries `heads` [first, first + count) of neighbouring tokens of one row, to one head of its keys and values.
template <class T, int64_t DIM, int64_t WIDTH>
void attend_row(const T* q, const T* keys, const T* values, const int64_t* positions, int64_t tokens, int64_t heads, int64_t query_step,
                int64_t out_step, Slots s, float scale, T* out, float* room) {
    float most[QUERIES], sum[QUERIES], w[BLOCK];
    const int64_t queries = tokens * heads, width = s.value_dim, longest = positions[tokens - 1] + 1;
    std::fill(room, room + queries * width, 0.0f);
    for (int64_t i = 0; i < queries; ++i) most[i] = -INFINITY, sum[i] = 0;
    for (int64_t first = 0; first < longest; first += BLOCK) {
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t t = i / heads, n = std::min(BLOCK, positions[t] + 1 - first);
            if (n <= 0) continue;
            score<T, DIM>(q + t * query_step + i % heads * s.key_dim, keys + first * s.key_dim, n, s.key_dim, scale, w);
            float top = most[i], added = 0;
            for (int64_t j = 0; j < n; ++j) top = w[j] > top ? w[j] : top;
            #pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < n; ++j) { w[j] = expo(w[j] - top); added += w[j]; }
            const float keep = expo(most[i] - top);
            sum[i] = sum[i] * keep + added, most[i] = top;
            mix<T, WIDTH>(w, values + first * s.value_step, n, width, s.value_step, keep, room + i * width);
        }
    }
    for (int64_t i = 0; i < queries; ++i) {
        T* to = out + i / heads * out_step + i % heads * width;
        for (int64_t c = 0; c < width; ++c) down(room[i * width + c] / sum[i], to[c]);
    }
}

template <class T> void attend(const T* q, const T* keys, const T* values, const int64_t* rows, const int64_t* positions, int64_t count,
                               int64_t groups, Slots s, float scale, T* out, int threads) {
    // A task: some neighbouring tokens of a row, one head of its keys, and some of the queries of each token to it.
    const int64_t heads = std::min(groups, QUERIES), parts = (groups + heads - 1) / heads, most = QUERIES / heads;
    int64_t* starts = static_cast<int64_t*>(std::malloc(sizeof(int64_t) * size_t(count + 1)));
    int64_t chunks = 0, work = 0;
    for (int64_t t = 0; t < count; ++t) {
        if (!t || rows[t] != rows[t - 1] || t - starts[chunks - 1] == most) starts[chunks++] = t;
        work += (positions[t] + 1) * s.kv * groups * s.key_dim;
    }
    starts[chunks] = count;
    auto run = attend_row<T, 0, 0>;
    if (s.key_dim == 64 && s.value_dim == 64) run = attend_row<T, 64, 64>;
    if (s.key_dim == 128 && s.value_dim == 128) run = attend_row<T, 128, 128>;
    std::atomic<int64_t> next{0};
    share(work > 65536, threads, [&](int64_t, int64_t) {
        float* room = static_cast<float*>(std::malloc(sizeof(float) * size_t(QUERIES * s.value_dim)));
        for (int64_t task; (task = next.fetch_add(1)) < chunks * s.kv * parts;) {
            const int64_t chunk = task / (s.kv * parts), head = task / parts % s.kv, part = task % parts * heads, t = starts[chunk];
            const int64_t query = (t * s.kv + head) * groups + part, slot = rows[t] * s.kv + head;
            run(q + query * s.key_dim, keys + slot * s.capacity * s.key_dim, values + slot * s.capacity * s.value_step, positions + t,
                starts[chunk + 1] - t, std::min(heads, groups - part), s.kv * groups * s.key_dim, s.kv * groups * s.value_dim, s, scale,
                out + query * s.value_dim, room);
        }
        std::free(room);
    });
    std::free(starts);
}

// ---- Drawing

constexpr int64_t PIECE = 256;

// exp(logits / temperature - most) of one piece, and its sum.
template <class T> float exponents(const T* logits, float temperature, float most, int64_t count, float* to) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) { to[i] = expo(up(logits[i]) / temperature - most); sum += to[i]; }
    return sum;
}

template <class T> void draw_row(const T* logits, float temperature, double uniform, int64_t vocab, double* ends, int64_t& token, float& logprob) {
    const bool greedy = temperature == 0.0f;
    const float by = greedy ? 1.0f : temperature;
    float most = -INFINITY, e[PIECE];
    #pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < vocab; ++i) { const float v = up(logits[i]); most = v > most ? v : most; }
    const float top = most / by;
    const int64_t pieces = (vocab + PIECE - 1) / PIECE;
    double total = 0;
    for (int64_t b = 0; b < pieces; ++b) ends[b] = total += double(exponents(logits + b * PIECE, by, top, std::min(PIECE, vocab - b * PIECE), e));
    token = 0;
    if (!(total > 0) || std::isinf(total)) { logprob = NAN; return; }
    if (greedy) {
        while (up(logits[token]) != most) ++token;
    } else {
        const double target = uniform * total;
        const int64_t b = std::min<int64_t>(std::upper_bound(ends, ends + pieces, target) - ends, pieces - 1);
        const int64_t count = std::min(PIECE, vocab - b * PIECE);
        exponents(logits + b * PIECE, by, top, count, e);
        // A piece's sum in single precision may exceed the sum made here by a rounding: then it is the last token with a probability.
        double sum = b ? ends[b - 1] : 0.0;
        for (int64_t i = 0; i < count; ++i) {
            if (e[i] > 0) token = b * PIECE + i;
            if ((sum += double(e[i])) > target) break;
        }
    }
    logprob = float(double(up(logits[token]) / by - top) - std::log(total));
}

template <class T> void draw(const T* logits, const float* temperature, const double* uniform, int64_t rows, int64_t vocab, int64_t* tokens,
                             float* logprobs, int threads) {
    std::atomic<int64_t> next{0};
    share(rows > 1 && rows * vocab > 16384, threads, [&](int64_t, int64_t) {
        double* ends = static_cast<double*>(std::malloc(sizeof(double) * size_t(vocab / PIECE + 1)));
        for (int64_t r; (r = next.fetch_add(1)) < rows;)
            draw_row(logits + r * vocab, temperature[r], uniform[r], vocab, ends, tokens[r], logprobs[r]);
        std::free(ends);
    });
}

}  // namespace

#define FOR_BOTH(NAME, PARAMETERS, CALL)                                    \
    void NAME##_fp32 PARAMETERS { using T = float; CALL; }                  \
    void NAME##_bf16 PARAMETERS { using T = bf16; CALL; }
#define IN(p) static_cast<const T*>(p)
#define OUT(p) static_cast<T*>(p)

extern "C" {

FOR_BOTH(add_norm, (void* x, const void* delta, const void* weight, float eps, void* out, int64_t rows, int64_t width, int threads),
         add_norm(OUT(x), IN(delta), IN(weight), eps, OUT(out), rows, width, threads))

FOR_BOTH(silu_mul, (const void* both, void* out, int64_t rows, int64_t width, int threads),
         silu_mul(IN(both), OUT(out), rows, width, threads))

FOR_BOTH(place,
         (const void* qkv, const void* norm, float eps, const void* cosine, const void* sine, const int64_t* positions, const int64_t* rows,
          int64_t count, int64_t query, int64_t kv, int64_t dim, int64_t rotary, void* q, void* keys, void* values, int64_t capacity, int threads),
         place(IN(qkv), IN(norm), eps, IN(cosine), IN(sine), positions, rows, count, Heads{query, kv, dim, rotary}, OUT(q), OUT(keys),
               OUT(values), capacity, threads))

FOR_BOTH(attend,
         (const void* q, const void* keys, const void* values, const int64_t* rows, const int64_t* positions, int64_t count, int64_t kv,
          int64_t groups, int64_t key_dim, int64_t value_dim, int64_t value_step, int64_t capacity, float scale, void* out, int threads),
         attend(IN(q), IN(keys), IN(values), rows, positions, count, groups, Slots{capacity, key_dim, value_dim, value_step, kv}, scale,
                OUT(out), threads))

FOR_BOTH(draw,
         (const void* logits, const float* temperature, const double* uniform, int64_t rows, int64_t vocab, int64_t* tokens, float* logprobs,
          int threads),
         draw(IN(logits), temperature, uniform, rows, vocab, tokens, logprobs, threads))

}  // extern "C"
