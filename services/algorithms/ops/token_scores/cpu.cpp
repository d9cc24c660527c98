// Products of s vectors with rows scattered over a matrix of gigabytes, and the union of row sets.
//
// A row is read once for up to eight vectors, two rows at a time, and asked for a dozen rows ahead: the time is the
// memory's. Integer products are exact, so every build gives the same numbers; half precision is summed in float32.
// Mirrored by services/algorithms/ops/token_scores/__init__.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kAhead = 12;  // rows asked for before they are needed
constexpr int64_t kLine = 64;

inline void ask_for(const void* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch((const char*)row + at, 0, 1);
}

struct Place {
    const int32_t* chosen;
    int64_t count;

    int64_t row(int64_t number) const { return chosen ? chosen[number] : number; }
};

// ---- int8 ---------------------------------------------------------------------------------------------------------

// What s vectors look like to the kernel: rows of `padded` int8 codes, zeros beyond the width.
struct Codes {
    int64_t width, padded;
    const int8_t* codes;
    const int32_t* sums;  // 128 times the sum of a vector's codes, what the rows' zero adds
    const float* steps;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

inline __m512i tail_load(const uint8_t* from, int64_t left) {
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    return _mm512_maskz_loadu_epi8(mask, from);
}

template <int kVectors>
void integer_rows(const uint8_t* first, const uint8_t* second, const Codes& vectors, int64_t vector, int32_t* sums) {
    __m512i a[kVectors], b[kVectors];
    for (int t = 0; t < kVectors; ++t) a[t] = b[t] = _mm512_setzero_si512();
    const int8_t* codes = vectors.codes + vector * vectors.padded;
    for (int64_t j = 0; j < vectors.width; j += 64) {
        const __m512i one = tail_load(first + j, vectors.width - j), two = tail_load(second + j, vectors.width - j);
        for (int t = 0; t < kVectors; ++t) {
            const __m512i code = _mm512_loadu_si512(codes + t * vectors.padded + j);
            a[t] = _mm512_dpbusd_epi32(a[t], one, code);
            b[t] = _mm512_dpbusd_epi32(b[t], two, code);
        }
    }
    for (int t = 0; t < kVectors; ++t) {
        sums[t] = _mm512_reduce_add_epi32(a[t]);
        sums[8 + t] = _mm512_reduce_add_epi32(b[t]);
    }
}

#elif defined(__AVX2__)

template <int kVectors>
void integer_rows(const uint8_t* first, const uint8_t* second, const Codes& vectors, int64_t vector, int32_t* sums) {
    for (int row = 0; row < 2; ++row) {
        const uint8_t* weights = row ? second : first;
        __m256i totals[kVectors];
        for (auto& total : totals) total = _mm256_setzero_si256();
        const int8_t* codes = vectors.codes + vector * vectors.padded;
        int64_t j = 0;
        for (; j + 16 <= vectors.width; j += 16) {
            const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(weights + j)));
            for (int t = 0; t < kVectors; ++t) {
                const __m128i code = _mm_loadu_si128((const __m128i*)(codes + t * vectors.padded + j));
                totals[t] = _mm256_add_epi32(totals[t], _mm256_madd_epi16(wide, _mm256_cvtepi8_epi16(code)));
            }
        }
        for (int t = 0; t < kVectors; ++t) {
            alignas(32) int32_t lanes[8];
            _mm256_store_si256((__m256i*)lanes, totals[t]);
            int32_t sum = 0;
            for (const int32_t lane : lanes) sum += lane;
            for (int64_t rest = j; rest < vectors.width; ++rest) {
                sum += (int32_t)weights[rest] * codes[t * vectors.padded + rest];
            }
            sums[8 * row + t] = sum;
        }
    }
}

#else

template <int kVectors>
void integer_rows(const uint8_t* first, const uint8_t* second, const Codes& vectors, int64_t vector, int32_t* sums) {
    for (int row = 0; row < 2; ++row) {
        const uint8_t* weights = row ? second : first;
        for (int t = 0; t < kVectors; ++t) {
            const int8_t* codes = vectors.codes + (vector + t) * vectors.padded;
            int32_t sum = 0;
            for (int64_t j = 0; j < vectors.width; ++j) sum += (int32_t)weights[j] * codes[j];
            sums[8 * row + t] = sum;
        }
    }
}

#endif

// ---- half precision -----------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

template <int kVectors>
void half_rows(const uint16_t* first, const uint16_t* second, const float* vectors, int64_t width, float* sums) {
    __m512 a[kVectors], b[kVectors];
    for (int t = 0; t < kVectors; ++t) a[t] = b[t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < width; j += 16) {
        const __mmask16 mask = width - j >= 16 ? 0xffff : (__mmask16)((1u << (width - j)) - 1);
        const __m512 one = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, first + j));
        const __m512 two = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, second + j));
        for (int t = 0; t < kVectors; ++t) {
            const __m512 vector = _mm512_maskz_loadu_ps(mask, vectors + t * width + j);
            a[t] = _mm512_fmadd_ps(one, vector, a[t]);
            b[t] = _mm512_fmadd_ps(two, vector, b[t]);
        }
    }
    for (int t = 0; t < kVectors; ++t) {
        sums[t] = _mm512_reduce_add_ps(a[t]);
        sums[8 + t] = _mm512_reduce_add_ps(b[t]);
    }
}

#else

inline float from_half(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    // Exponent and mantissa move to their float places; a multiplication by 2^112 mends the bias, subnormals too.
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    uint32_t signed_bits;
    std::memcpy(&signed_bits, &value, sizeof value);
    signed_bits |= sign;
    std::memcpy(&value, &signed_bits, sizeof value);
    return value;
#endif
}

template <int kVectors>
void half_rows(const uint16_t* first, const uint16_t* second, const float* vectors, int64_t width, float* sums) {
    constexpr int64_t kPart = 256;
    float decoded[kPart];
    for (int row = 0; row < 2; ++row) {
        const uint16_t* weights = row ? second : first;
        float lanes[kVectors][8] = {};
        for (int64_t begin = 0; begin < width; begin += kPart) {
            const int64_t part = std::min(kPart, width - begin);
            for (int64_t j = 0; j < part; ++j) decoded[j] = from_half(weights[begin + j]);
            for (int t = 0; t < kVectors; ++t) {
                const float* vector = vectors + t * width + begin;
                int64_t j = 0;
                for (; j + 8 <= part; j += 8) {
                    for (int lane = 0; lane < 8; ++lane) lanes[t][lane] += decoded[j + lane] * vector[j + lane];
                }
                for (; j < part; ++j) lanes[t][0] += decoded[j] * vector[j];
            }
        }
        for (int t = 0; t < kVectors; ++t) {
            float sum = 0;
            for (const float lane : lanes[t]) sum += lane;
            sums[8 * row + t] = sum;
        }
    }
}

#endif

// Calls body with a compile-time number of vectors, 1 to 8.
template <typename Body>
void with_count(int64_t count, const Body& body) {
    switch (count) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        case 4: return body(std::integral_constant<int, 4>{});
        case 5: return body(std::integral_constant<int, 5>{});
        case 6: return body(std::integral_constant<int, 6>{});
        case 7: return body(std::integral_constant<int, 7>{});
        default: return body(std::integral_constant<int, 8>{});
    }
}

}  // namespace

extern "C" {

// out (count, s): sums of (weights - 128) times codes, times the row's and the vector's step.
void freshet_integer_scores(const uint8_t* weights, const float* scales, const int8_t* codes, const float* steps,
                            int64_t num_vectors, int64_t width, const int32_t* chosen, int64_t count, float* out) {
    const int64_t padded = (width + 63) / 64 * 64;
    std::vector<int8_t> wide(num_vectors * padded, 0);
    std::vector<int32_t> zeros(num_vectors, 0);
    for (int64_t t = 0; t < num_vectors; ++t) {
        std::memcpy(wide.data() + t * padded, codes + t * width, width);
        for (int64_t j = 0; j < width; ++j) zeros[t] += 128 * codes[t * width + j];
    }
    const Codes vectors{width, padded, wide.data(), zeros.data(), steps};
    const Place place{chosen, count};
    for (int64_t block = 0; block < num_vectors; block += 8) {
        with_count(std::min<int64_t>(8, num_vectors - block), [&](auto constant) {
            constexpr int kVectors = decltype(constant)::value;
            for (int64_t u = 0; u < count; u += 2) {
                if (chosen) {
                    for (int64_t next = u + kAhead; next < std::min(u + kAhead + 2, count); ++next) {
                        ask_for(weights + place.row(next) * width, width);
                        __builtin_prefetch(scales + place.row(next), 0, 1);
                    }
                }
                const int64_t rows[2] = {place.row(u), place.row(std::min(u + 1, count - 1))};
                int32_t sums[16];
                integer_rows<kVectors>(weights + rows[0] * width, weights + rows[1] * width, vectors, block, sums);
                for (int64_t row = 0; row < std::min<int64_t>(2, count - u); ++row) {
                    const float scale = scales[rows[row]];
                    float* to = out + (u + row) * num_vectors + block;
                    for (int t = 0; t < kVectors; ++t) {
                        to[t] = (float)(sums[8 * row + t] - zeros[block + t]) * (scale * steps[block + t]);
                    }
                }
            }
        });
    }
}

// out (count, s): sums of weights times vectors (s, width).
void freshet_half_scores(const uint16_t* weights, const float* vectors, int64_t num_vectors, int64_t width,
                         const int32_t* chosen, int64_t count, float* out) {
    const Place place{chosen, count};
    for (int64_t block = 0; block < num_vectors; block += 8) {
        with_count(std::min<int64_t>(8, num_vectors - block), [&](auto constant) {
            constexpr int kVectors = decltype(constant)::value;
            for (int64_t u = 0; u < count; u += 2) {
                if (chosen) {
                    for (int64_t next = u + kAhead; next < std::min(u + kAhead + 2, count); ++next) {
                        ask_for(weights + place.row(next) * width, 2 * width);
                    }
                }
                const int64_t rows[2] = {place.row(u), place.row(std::min(u + 1, count - 1))};
                float sums[16];
                half_rows<kVectors>(weights + rows[0] * width, weights + rows[1] * width, vectors + block * width,
                                    width, sums);
                for (int64_t row = 0; row < std::min<int64_t>(2, count - u); ++row) {
                    std::memcpy(out + (u + row) * num_vectors + block, sums + 8 * row, kVectors * sizeof(float));
                }
            }
        });
    }
}

// out (m,): products of float rows (m, width) with one vector, in sixteen sums.
void freshet_products(const float* rows, const float* vector, int64_t count, int64_t width, float* out) {
    using Sums = float __attribute__((vector_size(64), aligned(4)));
    for (int64_t row = 0; row < count; ++row) {
        const float* from = rows + row * width;
        Sums sums = {};
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) sums += *(const Sums*)(from + j) * *(const Sums*)(vector + j);
        float sum = 0;
        for (int lane = 0; lane < 16; ++lane) sum += sums[lane];
        for (; j < width; ++j) sum += from[j] * vector[j];
        out[row] = sum;
    }
}

// The sorted union of k sets of r numbers below `num_rows`, and 0; `out` has room for k r + 1. A bit per number is
// 0.6 MB at five million, which stays in the cache; the bits are left clear for the next call of this thread.
int64_t freshet_union(const int32_t* sets, int64_t r, const int64_t* chosen, int64_t k, int64_t num_rows, int32_t* out) {
    thread_local std::vector<uint64_t> bits;
    const int64_t words = (num_rows + 63) / 64;
    if ((int64_t)bits.size() < words) bits.assign(words, 0);
    bits[0] |= 1;
    for (int64_t i = 0; i < k; ++i) {
        const int32_t* set = sets + chosen[i] * r;
        if (i + 1 < k) __builtin_prefetch(sets + chosen[i + 1] * r, 0, 1);
        for (int64_t j = 0; j < r; ++j) bits[set[j] >> 6] |= 1ull << (set[j] & 63);
    }
    int64_t count = 0;
    for (int64_t word = 0; word < words; ++word) {
        for (uint64_t left = bits[word]; left; left &= left - 1) {
            out[count++] = (int32_t)(word * 64 + __builtin_ctzll(left));
        }
        bits[word] = 0;
    }
    return count;
}

}  // extern "C"
