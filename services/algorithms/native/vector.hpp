// Vectors of floats and doubles as wide as the instruction set that this file is compiled for, with exp and SiLU.
//
// GCC vector extensions (and three AVX-512 intrinsics where those do worse), so the same source serves AVX-512, AVX2,
// baseline x86 and other processors: `Floats` holds kLanes of them. Error bounds are stated in units of roundoff (2^-24, and
// 2^-53 for doubles) and tested for each instruction set in tests/unit/ops/test_native_vector.py.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace freshet {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Doubles = double __attribute__((vector_size(4 * kLanes)));  // half as many
using Longs = int64_t __attribute__((vector_size(4 * kLanes)));

// Subtracting nothing keeps the sign of zero, so it costs nothing; adding to zero would be an addition.
inline Floats splat(float value) { return value - Floats{}; }
inline Doubles splat(double value) { return value - Doubles{}; }

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Doubles load(const double* from) {
    Doubles value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(double* to, Doubles value) { std::memcpy(to, &value, sizeof value); }

#ifdef __AVX512F__
// The general form below becomes a comparison and a blend.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
#else
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
#endif
inline Doubles max(Doubles a, Doubles b) { return a > b ? a : b; }
inline Doubles min(Doubles a, Doubles b) { return a < b ? a : b; }

// exp(x) for |x| <= 87.3, relative error at most 4 units; nothing is promised beyond. Range reduction x = n ln 2 + r,
// then the polynomial of degree 5 that is best on |r| <= ln 2 / 2 (1.6 units before rounding).
inline Floats exp_in_range(Floats x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats shifted = x * 1.44269504f + kRound;
    const Floats n = shifted - kRound;
    // ln 2 in two parts, the first short enough that n times it is exact.
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = r * 0x1.0fa80ep-7f + 0x1.573a86p-5f;
    p = p * r + 0x1.555a6cp-3f;
    p = p * r + 0x1.fffdc4p-2f;
    p = p * r + 0x1.fffff6p-1f;
    p = p * r + 1.0f;
    Ints exponent, bits;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;  // the constant's own bits leave at the top
    std::memcpy(&p, &bits, sizeof p);
    return p;
}

// exp(x) for x <= 0, as a softmax needs it: relative error at most 4 units down to -87.3, at most 2e-38 off below.
inline Floats exp_not_positive(Floats x) { return exp_in_range(max(x, splat(-87.3f))); }

// exp(x) for every x but NaN: relative error at most 4 units for |x| <= 87.3; beyond, it stays at exp(+-87.3).
inline Floats exp_saturated(Floats x) { return exp_in_range(min(max(x, splat(-87.3f)), splat(87.3f))); }

// 1 / x for x in [1, 2^126): relative error at most 1.5 units.
inline Floats reciprocal(Floats x) {
#ifdef __AVX512F__
    // An estimate good to 2^-14 and one Newton step: a 512-bit division takes four times as long.
    const Floats estimate = _mm512_rcp14_ps(x);
    return estimate + estimate * (1.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

// x * sigmoid(x) for every x but NaN: relative error at most 6 units for x >= -87.3 (and no overflow however large x
// is), at most 2e-36 off below.
inline Floats silu(Floats x) {
    const Floats bounded = max(x, splat(-87.3f));
    return bounded * reciprocal(1.0f + exp_in_range(-min(bounded, splat(87.3f))));
}

// The same in double precision, for |x| <= 708: exp within 4 units, by the Taylor polynomial of degree 13.
inline Doubles exp_in_range(Doubles x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    const Doubles shifted = x * 1.4426950408889634 + kRound;
    const Doubles n = shifted - kRound;
    const Doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    constexpr double kInverseFactorials[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                             1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                             0.5,             1.0,            1.0};
    Doubles p = splat(1.0 / 6227020800);
    for (const double coefficient : kInverseFactorials) p = p * r + coefficient;
    Longs exponent, bits;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 52;
    std::memcpy(&p, &bits, sizeof p);
    return p;
}

inline Doubles exp_not_positive(Doubles x) { return exp_in_range(max(x, splat(-708.0))); }

// x * sigmoid(x) within 6 units for x >= -708, at most 1e-304 off below.
inline Doubles silu(Doubles x) {
    const Doubles bounded = max(x, splat(-708.0));
    return bounded / (1.0 + exp_in_range(-min(bounded, splat(708.0))));
}

}  // namespace freshet
