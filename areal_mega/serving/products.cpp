// Products of bf16, where the CPU has them (AVX512-BF16); elsewhere this file is empty. As kernels.cpp in everything.

#include "kernels.h"

#ifdef __AVX512BF16__
namespace {

constexpr int64_t ROWS = 8, VECTORS = 3, PANEL = 16 * VECTORS, AHEAD = 4096;  // 24 sums, 3 weights and an input in 32 registers

// One panel's outputs of MR rows of x. Weights: [k / 2][48 outputs][2 inputs].
template <int MR> void tile(const bf16* const* x, int64_t pairs, const uint8_t* weights, const float* bias, int64_t outputs, bf16* const* out) {
    __m512 sums[MR][VECTORS];
    #pragma GCC unroll 3
    for (int v = 0; v < VECTORS; ++v) {
        const __m512 start = bias ? _mm512_loadu_ps(bias + 16 * v) : _mm512_setzero_ps();
        #pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) sums[m][v] = start;
    }
    const int32_t* in[MR];
    for (int m = 0; m < MR; ++m) in[m] = reinterpret_cast<const int32_t*>(x[m]);
    for (int64_t i = 0; i < pairs; ++i, weights += 64 * VECTORS) {
        __m512bh w[VECTORS];
        #pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
            w[v] = (__m512bh)_mm512_loadu_si512(weights + 64 * v);
            _mm_prefetch(weights + 64 * v + AHEAD, _MM_HINT_T0);  // with few rows it is memory that limits
        }
        #pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(in[m][i]);
            #pragma GCC unroll 3
            for (int v = 0; v < VECTORS; ++v) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], w[v], both);
        }
    }
    #pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
        #pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t left = outputs - 16 * v;
            const __mmask16 mask = left >= 16 ? __mmask16(0xffff) : __mmask16(left > 0 ? (1 << left) - 1 : 0);
            _mm256_mask_storeu_epi16(out[m] + 16 * v, mask, (__m256i)_mm512_cvtneps_pbh(sums[m][v]));
        }
}

void panel(const bf16* const* x, int64_t rows, int64_t pairs, const uint8_t* weights, const float* bias, int64_t outputs, bf16* const* out) {
    static constexpr decltype(&tile<1>) tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>};
    for (int64_t m = 0; m < rows;) {
        const int64_t count = std::min(ROWS, rows - m);
        tiles[count - 1](x + m, pairs, weights, bias, outputs, out + m);
        m += count;
    }
}

}  // namespace

extern "C" {

// weight [outputs, inputs], inputs even, to panels [ceil(outputs / 48)][inputs / 2][48][2]; the last one is filled up with zeros.
void pack(const uint32_t* weight, int64_t outputs, int64_t inputs, uint32_t* to, int threads) {
    const int64_t pairs = inputs / 2, panels = (outputs + PANEL - 1) / PANEL;
    share(panels > 1, threads, [=](int64_t me, int64_t all) {
        for (int64_t p = panels * me / all; p < panels * (me + 1) / all; ++p)
            for (int64_t i = 0; i < pairs; ++i)
                for (int64_t n = 0; n < PANEL; ++n)
                    to[(p * pairs + i) * PANEL + n] = p * PANEL + n < outputs ? weight[(p * PANEL + n) * pairs + i] : 0;
    });
}

// out[m] = x[from[m]] W^T + bias for groups of rows, each with its own weight: group g has rows [ends[g - 1], ends[g]) of out. `from` may
// be null: row m of x. Panels of all groups are shared among the threads; bias (fp32, filled up to whole panels) may be null.
void product(const void* x, const int64_t* from, const int64_t* ends, int64_t groups, const void* const* weights, const float* bias,
             int64_t outputs, int64_t inputs, void* out, int threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, pairs = inputs / 2;
    const bf16* input = static_cast<const bf16*>(x);
    bf16* result = static_cast<bf16*>(out);
    std::atomic<int64_t> next{0};
    share(groups * panels > 1, threads, [&](int64_t, int64_t) {
        const bf16* in[64];
        bf16* to[64];
        for (int64_t task; (task = next.fetch_add(1)) < groups * panels;) {
            const int64_t g = task / panels, p = task % panels, end = ends[g];
            for (int64_t m = g ? ends[g - 1] : 0; m < end; m += 64) {
                const int64_t count = std::min<int64_t>(64, end - m);
                for (int64_t i = 0; i < count; ++i) {
                    in[i] = input + (from ? from[m + i] : m + i) * inputs;
                    to[i] = result + (m + i) * outputs + p * PANEL;
                }
                panel(in, count, pairs, static_cast<const uint8_t*>(weights[g]) + p * pairs * 64 * VECTORS, bias ? bias + p * PANEL : nullptr,
                      outputs - p * PANEL, to);
            }
        }
    });
}

void linear(const void* x, int64_t rows, const void* weight, const float* bias, int64_t outputs, int64_t inputs, void* out, int threads) {
    product(x, nullptr, &rows, 1, &weight, bias, outputs, inputs, out, threads);
}

// Sort the `count` choices (experts of tokens, k each) by expert: from[m] the token, where[choice] its place, ends per expert.
void sort_choices(const int64_t* chosen, int64_t count, int64_t k, int64_t experts, int64_t* from, int64_t* where, int64_t* ends) {
    std::fill(ends, ends + experts, 0);
    for (int64_t i = 0; i < count; ++i) ++ends[chosen[i]];
    for (int64_t e = 1; e < experts; ++e) ends[e] += ends[e - 1];
    for (int64_t i = count - 1; i >= 0; --i) { const int64_t m = --ends[chosen[i]]; from[m] = i / k, where[i] = m; }
    for (int64_t e = 0; e + 1 < experts; ++e) ends[e] = ends[e + 1];
    if (experts) ends[experts - 1] = count;
}

// out[t] = sum over k of weight[t, k] * x[where[t, k]], in the order of k.
void combine(const bf16* x, const int64_t* where, const float* weight, int64_t rows, int64_t k, int64_t width, bf16* out, int threads) {
    share(rows * k * width > 16384, threads, [=](int64_t me, int64_t all) {
        float sums[256];
        for (int64_t t = rows * me / all; t < rows * (me + 1) / all; ++t)
            for (int64_t first = 0; first < width; first += 256) {
                const int64_t count = std::min<int64_t>(256, width - first);
                for (int64_t i = 0; i < count; ++i) sums[i] = 0;
                for (int64_t j = 0; j < k; ++j) {
                    const bf16* row = x + where[t * k + j] * width + first;
                    const float by = weight[t * k + j];
                    for (int64_t i = 0; i < count; ++i) sums[i] += by * up(row[i]);
                }
                for (int64_t i = 0; i < count; ++i) down(sums[i], out[t * width + first + i]);
            }
    });
}

}  // extern "C"
#endif
