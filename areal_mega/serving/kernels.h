// What kernels.cpp and products.cpp have in common: numbers, the exponential, threads.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <omp.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bf16 { uint16_t bits; };

inline float up(bf16 v) { uint32_t u = uint32_t(v.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float up(float v) { return v; }
inline void down(float f, float& out) { out = f; }
inline void down(float f, bf16& out) {
    uint32_t u; std::memcpy(&u, &f, 4);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to the nearest, ties to even
    out.bits = uint16_t(f == f ? rounded : 0x7fc0u);
}

// exp for any float: NaN stays, below -87.3 (the least normal result) 0, above 88 as at 88. Relative error below 2e-7.
inline float expo(float x) {
    const float y = x > 88.0f ? 88.0f : x;
    const float n = std::nearbyintf(y * 1.44269504f);
    const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;  // minimax polynomial of exp(r) - 1 - r on [-ln 2 / 2, ln 2 / 2] over r^2
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    const float whole = p * (r * r) + r + 1.0f;
    const float in_range = y < -87.3f ? 0.0f : n;
    const int32_t power = (int32_t(in_range) + 127) << 23;
    float scale; std::memcpy(&scale, &power, 4);
    return y < -87.3f ? 0.0f : whole * scale;
}

// All threads or this one alone: a team of another size would end threads and start new ones.
template <class F> void share(bool worth, int threads, F&& work) {
    if (!worth || threads < 2) { work(0, 1); return; }
    #pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace
