// The bound pass of exact top-K over a Mixture of Logits: which items can score at least a threshold at all.
//
// One vector lane is one (query component, item component) pair, so an item's P cosines sit in P / 16 registers in the
// order of the gates, and nothing is transposed. Per item and query: int8 dot products, then "is the largest cosine high
// enough", then the gate-interval test, with the gate's network in int8. docs/decisions/006 proves the tests; tables.py
// and int8_network.py make the numbers that they read.
//
// Letters: L lanes (pairs padded to 16), PX item components padded to a power of two, d4 = d / 4 rounded up, G hidden
// width padded to 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "parallel.hpp"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kTile = 64;  // items per tile: one word of the answer, 16 KB of codes at 8 x 32
constexpr int kTogether = 4;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float FloatsAnywhere __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntsAnywhere __attribute__((vector_size(64), aligned(4)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(16), aligned(1)));

// exp(SiLU(g)) on a grid of 1 / 128 over [-8, 24): nearest entry, so |log error| <= 1.0999 / 256 (tables.WEIGHT_ERROR);
// below -8 it is within that of 1 as well.
constexpr int kGrid = 128;
constexpr int kEntries = 32 * kGrid;
constexpr float kLowest = -8.0f;
constexpr float kTurn = -1.2784645f;  // where SiLU is smallest

struct WeightTable {
    float entries[kEntries + 1];
    WeightTable() {
        for (int i = 0; i <= kEntries; ++i) {
            const double g = kLowest + static_cast<double>(i) / kGrid;
            entries[i] = static_cast<float>(std::exp(g / (1.0 + std::exp(-g))));
        }
    }
};
const WeightTable kWeights;

inline Floats load(const float* from) { return *reinterpret_cast<const FloatsAnywhere*>(from); }
inline Ints load(const int32_t* from) { return *reinterpret_cast<const IntsAnywhere*>(from); }
inline Floats all(float value) { return value - Floats{}; }
// Both return b where a is NaN. (Written out for AVX-512, where the compiler makes two instructions of each.)
#if defined(__AVX512VNNI__)
inline Floats larger(Floats a, Floats b) {
    return reinterpret_cast<Floats>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
inline Floats smaller(Floats a, Floats b) {
    return reinterpret_cast<Floats>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
inline Floats widen(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats widen(const int8_t* from) {
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Floats);
}
#endif
inline Floats magnitude(Floats a) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7fffffff); }

inline float sum(Floats a) {
    float total = 0;
#if defined(__AVX512VNNI__)
    total = _mm512_reduce_add_ps(reinterpret_cast<__m512>(a));
#else
    for (int lane = 0; lane < kLanes; ++lane) total += a[lane];
#endif
    return total;
}

inline float largest(Floats a) {
#if defined(__AVX512VNNI__)
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(a));
#else
    float best = a[0];
    for (int lane = 1; lane < kLanes; ++lane) best = std::max(best, a[lane]);
    return best;
#endif
}

}  // namespace

extern "C" {

// Arrays of X items. codes (X, d4, PX, 4) unsigned, 128 = zero; gates (X, L), null without item gates.
struct FreshetItems {
    const uint8_t* codes;
    const float* scales;
    const float* component_errors;
    const float* item_errors;
    const int8_t* gates;
    int64_t num_items;
    int32_t quads;  // d4
    int32_t padded_components;  // PX
    int32_t vectors;  // L / 16
};

// Arrays of B queries, (B, L) each unless said; see tables.py for what each number is.
struct FreshetQueries {
    const int8_t* codes;  // (B, d4, L, 4)
    const int32_t* corrections;
    const float* scales;
    const float* outside;  // 0, or -inf for padding
    const float* inside;  // 1, or 0 for padding
    const float* width;
    const float* gate;
    const float* scalars;  // (B, 8): threshold, e0, e1, r0, r1, slack, weight error, function error
    const float* cosine_scales;  // (B,): one step of a cosine's code in the network
    int32_t num_queries;
    int32_t gated;  // 0: the largest cosine is the whole test
};

// The pair network in int8. hidden (L / 4, G, 4), out (G / 4, L, 4); vectors (G,) or (L,); segments of SiLU (32,).
struct FreshetNetwork {
    const int8_t* hidden;
    const int32_t* hidden_corrections;
    const float* hidden_scales;
    const float* hidden_bias;
    const int8_t* out;
    const float* out_scales;
    const float* out_offsets;
    const float* steepness;
    const float* hidden_rounding;
    const float* out_rounding;
    const float* out_sums;
    const float* segment_values;
    const float* segment_slopes;
    float zero;  // what code 0 of an activation stands for
    int32_t hidden_vectors;
};

}  // extern "C"

namespace {

// An array on cache-line boundaries: a vector that crosses one costs two loads.
template <typename T>
struct Aligned {
    explicit Aligned(size_t count) : values(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 64) / 64 * 64))) {
        std::fill_n(values.get(), count, T{});
    }
    T* data() const { return values.get(); }
    T& operator[](size_t i) const { return values.get()[i]; }
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> values;
};

// What one worker writes while it looks at a group of items: row i of each array is item i's. Every stage runs over the
// whole group, as one item alone is a chain of dependent steps that leaves the processor waiting.
struct Workspace {
    Aligned<int32_t> integers;
    Aligned<float> cosines, from_turn, half_width, hidden;
    Aligned<uint8_t> codes;
    int lanes, hidden_lanes, count = 0;
    int64_t items[kTogether];
    float thresholds[kTogether], norm_errors[kTogether];
    Workspace(int lanes, int hidden_lanes)
        : integers(kTogether * std::max(lanes, hidden_lanes)), cosines(kTogether * lanes),
          from_turn(kTogether * lanes), half_width(kTogether * lanes), hidden(kTogether * hidden_lanes),
          codes(kTogether * std::max(lanes, hidden_lanes)), lanes(lanes), hidden_lanes(hidden_lanes) {}
    const int8_t* gates_of(const FreshetItems& catalogue, int i) const {
        return catalogue.gates == nullptr ? nullptr : catalogue.gates + items[i] * lanes;
    }
};

inline void store(float* to, Floats value) { *reinterpret_cast<FloatsAnywhere*>(to) = value; }

// The item's part of the gate times the query's, added to `from_turn`.
inline Floats with_gate(const FreshetQueries& queries, int64_t at, const int8_t* gates, int v, Floats from_turn) {
    if (gates == nullptr) return from_turn;
    return from_turn + load(queries.gate + at) * widen(gates + v * kLanes);
}

// Gates without a network, from the item's part and the query's: middles (less the turn) and half widths.
void read_gates(const FreshetItems& catalogue, const FreshetQueries& queries, int64_t query, Workspace& work) {
    for (int i = 0; i < work.count; ++i) {
        for (int v = 0; v < work.lanes / kLanes; ++v) {
            const int64_t at = query * work.lanes + v * kLanes, to = i * work.lanes + v * kLanes;
            const Floats middle = with_gate(queries, at, work.gates_of(catalogue, i), v, all(-kTurn));
            store(work.from_turn.data() + to, middle);
            store(work.half_width.data() + to, load(queries.width + at));
        }
    }
}

// out (M items, N vectors of 16) = start + codes (M, 4 * quads) x weights (quads, stride, 4), from vector `first` on.
template <int M, int N>
void multiply(const uint8_t* codes, int code_stride, int quads, const int8_t* weights, int stride, int first,
              const int32_t* start, int32_t* out) {
#if defined(__AVX512VNNI__)
    __m512i acc[M][N];
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m)
            acc[m][n] = start == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(start + (first + n) * kLanes);
    for (int j = 0; j < quads; ++j) {
        const int8_t* from = weights + (int64_t{j} * stride + first * kLanes) * 4;
        __m512i item[M];
        for (int m = 0; m < M; ++m) {
            int32_t value;
            std::memcpy(&value, codes + m * code_stride + j * 4, 4);
            item[m] = _mm512_set1_epi32(value);
        }
        for (int n = 0; n < N; ++n) {
            const __m512i weight = _mm512_loadu_si512(from + n * 64);
            for (int m = 0; m < M; ++m) acc[m][n] = _mm512_dpbusd_epi32(acc[m][n], item[m], weight);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) _mm512_storeu_si512(out + m * stride + (first + n) * kLanes, acc[m][n]);
#else
    for (int m = 0; m < M; ++m) {
        int32_t* target = out + m * stride + first * kLanes;
        const uint8_t* item = codes + m * code_stride;
        for (int lane = 0; lane < N * kLanes; ++lane)
            target[lane] = start == nullptr ? 0 : start[first * kLanes + lane];
        for (int j = 0; j < quads; ++j) {
            const int8_t* from = weights + (int64_t{j} * stride + first * kLanes) * 4;
            for (int lane = 0; lane < N * kLanes; ++lane) {
                int32_t part = 0;
                for (int byte = 0; byte < 4; ++byte)
                    part += int32_t{item[j * 4 + byte]} * int32_t{from[lane * 4 + byte]};
                target[lane] += part;
            }
        }
    }
#endif
}

// Codes (kTogether, 4 * quads) of a group times weights (quads, 16 * vectors, 4): out (kTogether, 16 * vectors).
void multiply_all(const uint8_t* codes, int quads, const int8_t* weights, int vectors, const int32_t* start,
                  int32_t* out) {
    const int stride = vectors * kLanes;
    int first = 0;
    for (; first + 4 <= vectors; first += 4)
        multiply<kTogether, 4>(codes, quads * 4, quads, weights, stride, first, start, out);
    for (; first + 2 <= vectors; first += 2)
        multiply<kTogether, 2>(codes, quads * 4, quads, weights, stride, first, start, out);
    if (first < vectors) multiply<kTogether, 1>(codes, quads * 4, quads, weights, stride, first, start, out);
}

inline void store_codes(uint8_t* to, Floats value) {
    // Truncation of a value that is at least 0.5: rounds to the nearest code.
    *reinterpret_cast<UnsignedBytes*>(to) = __builtin_convertvector(__builtin_convertvector(value, Ints), UnsignedBytes);
}

// Gates by the network itself in int8: middles (less the turn) and half widths.
void run_network(const FreshetItems& catalogue, const FreshetQueries& queries, const FreshetNetwork& network,
                 int64_t query, Workspace& work) {
    const int lanes = work.lanes, vectors = lanes / kLanes, hidden_lanes = work.hidden_lanes;
    const int64_t base = query * lanes;
    const float slack = queries.scalars[query * 8 + 5], function_error = queries.scalars[query * 8 + 7];
    const float step = queries.cosine_scales[query], per_step = 1.0f / step;
    float cosine_norms[kTogether], active_norms[kTogether], active_steps[kTogether];
    for (int i = 0; i < work.count; ++i) {
        Floats squares{};
        for (int v = 0; v < vectors; ++v) {
            const Floats cosine = load(work.cosines.data() + i * lanes + v * kLanes);
            squares += cosine * cosine;
            const Floats code = smaller(larger(cosine * per_step + 128.5f, all(1.0f)), all(255.5f));
            store_codes(work.codes.data() + i * lanes + v * kLanes, code);
        }
        cosine_norms[i] = std::sqrt(sum(squares)) * (1 + slack);
    }
    multiply_all(work.codes.data(), lanes / 4, network.hidden, network.hidden_vectors, network.hidden_corrections,
                 work.integers.data());
    const Floats values_low = load(network.segment_values), values_high = load(network.segment_values + kLanes);
    const Floats slopes_low = load(network.segment_slopes), slopes_high = load(network.segment_slopes + kLanes);
    for (int i = 0; i < work.count; ++i) {
        const int32_t* integers = work.integers.data() + i * hidden_lanes;
        float* actives = work.hidden.data() + i * hidden_lanes;
        Floats highest = all(0.0f), squares{};
        for (int at = 0; at < hidden_lanes; at += kLanes) {
            const Floats integer = __builtin_convertvector(load(integers + at), Floats);
            const Floats hidden = integer * (load(network.hidden_scales + at) * step) + load(network.hidden_bias + at);
            const Floats place = smaller(larger(hidden * 2.0f + 16.0f, Floats{}), all(31.0f));
            const Ints segment = __builtin_convertvector(place, Ints);
            const Floats active = __builtin_shuffle(values_low, values_high, segment) +
                                  __builtin_shuffle(slopes_low, slopes_high, segment) * hidden;
            highest = larger(highest, active);
            squares += active * active;
            store(actives + at, active);
        }
        active_steps[i] = (largest(highest) - network.zero) * (1.0f / 254.0f);
        active_norms[i] = std::sqrt(sum(squares)) * (1 + slack);
    }
    for (int i = 0; i < work.count; ++i) {
        const float per_active = 1.0f / active_steps[i];
        for (int at = 0; at < hidden_lanes; at += kLanes) {
            const Floats active = load(work.hidden.data() + i * hidden_lanes + at);
            store_codes(work.codes.data() + i * hidden_lanes + at, (active - network.zero) * per_active + 0.5f);
        }
    }
    multiply_all(work.codes.data(), hidden_lanes / 4, network.out, vectors, nullptr, work.integers.data());
    for (int i = 0; i < work.count; ++i) {
        const int8_t* gates = work.gates_of(catalogue, i);
        const float active_error = active_steps[i] * 0.501f + function_error;
        for (int v = 0; v < vectors; ++v) {
            const int at = v * kLanes;
            const Floats integer = __builtin_convertvector(load(work.integers.data() + i * lanes + at), Floats);
            const Floats from_turn =
                integer * (load(network.out_scales + at) * active_steps[i]) + load(network.out_offsets + at);
            Floats half_width = load(queries.width + base + at) + load(network.steepness + at) * work.norm_errors[i];
            half_width += load(network.hidden_rounding + at) * cosine_norms[i];
            half_width += load(network.out_rounding + at) * active_norms[i] + load(network.out_sums + at) * active_error;
            store(work.from_turn.data() + i * lanes + at, with_gate(queries, base + at, gates, v, from_turn));
            store(work.half_width.data() + i * lanes + at, half_width);
        }
    }
}

// Whether some gates in item i's intervals give s >= threshold.
bool can_reach(const FreshetQueries& queries, int64_t query, int i, const Workspace& work) {
    const int64_t base = query * work.lanes;
    const float threshold = work.thresholds[i];
    Floats total{}, absolute{};
    for (int at = 0; at < work.lanes; at += kLanes) {
        const Floats from_turn = load(work.from_turn.data() + i * work.lanes + at);
        const Floats half_width = load(work.half_width.data() + i * work.lanes + at);
        const Floats above = load(work.cosines.data() + i * work.lanes + at) - threshold;
        // The heaviest weight for cosines above the threshold, the lightest for those below. W falls until the turn
        // and rises after it, and is larger at turn + y than at turn - y: so the heaviest of an interval lies at its
        // far end, taken as right of the turn unless the whole interval is left of it; the lightest at its near end.
        const Floats wanted = above > 0 ? half_width : -half_width;
        const Floats distance = larger(magnitude(from_turn) + wanted, Floats{});
        const Floats place = from_turn < smaller(-wanted, Floats{}) ? -distance : distance;
        const Floats scaled = (place + (kTurn - kLowest)) * kGrid + 0.5f;
        const Floats clamped = smaller(larger(scaled, Floats{}), all(kEntries));
        const Ints index = __builtin_convertvector(clamped, Ints);
        Floats weight;
#if defined(__AVX512VNNI__)
        weight = reinterpret_cast<Floats>(
            _mm512_i32gather_ps(reinterpret_cast<__m512i>(index), kWeights.entries, sizeof(float)));
#else
        for (int lane = 0; lane < kLanes; ++lane) weight[lane] = kWeights.entries[index[lane]];
#endif
        // Beyond the grid only the lightest weight is known to be at least the last entry.
        const Floats beyond = scaled < all(kEntries) ? Floats{} : all(INFINITY);
        weight = above > 0 ? weight + beyond : weight;
        weight *= load(queries.inside + base + at);
        total += weight * above;
        absolute += weight * magnitude(above);
    }
    // Negated, so that whatever overflowed into an infinity or a NaN stays in.
    return !(sum(total) + queries.scalars[query * 8 + 6] * sum(absolute) < 0);
}

// Tests the gates of the group and empties it: sets the bits, from `start` on, of those that stay.
void settle(const FreshetItems& catalogue, const FreshetQueries& queries, const FreshetNetwork* network, int64_t query,
            int64_t start, Workspace& work, uint64_t& bits) {
    if (network != nullptr) {
        run_network(catalogue, queries, *network, query, work);
    } else {
        read_gates(catalogue, queries, query, work);
    }
    for (int i = 0; i < work.count; ++i)
        if (can_reach(queries, query, i, work)) bits |= uint64_t{1} << (work.items[i] - start);
    work.count = 0;
}

// `PX` item components of one item, repeated over 16 lanes.
#if defined(__AVX512VNNI__)
template <int PX>
inline __m512i repeat(const uint8_t* from) {
    if constexpr (PX == 1) {
        int32_t value;
        std::memcpy(&value, from, 4);
        return _mm512_set1_epi32(value);
    } else if constexpr (PX == 2) {
        int64_t value;
        std::memcpy(&value, from, 8);
        return _mm512_set1_epi64(value);
    } else if constexpr (PX == 4) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    } else if constexpr (PX == 8) {
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    } else {
        return _mm512_loadu_si512(from);
    }
}
#endif

// Integer dot products of four items with N vectors of lanes from vector `first` on: out (4, L).
template <int PX, int N>
void dots(const uint8_t* const* items, const int8_t* codes, const int32_t* corrections, int first, int vectors,
          int quads, int padded_components, int32_t* out) {
    const int lanes = vectors * kLanes;
#if defined(__AVX512VNNI__)
    __m512i acc[kTogether][N];
    for (int n = 0; n < N; ++n) {
        const __m512i start = _mm512_loadu_si512(corrections + (first + n) * kLanes);
        for (int i = 0; i < kTogether; ++i) acc[i][n] = start;
    }
    const int blocks = std::max(1, padded_components / kLanes);
    for (int j = 0; j < quads; ++j) {
        __m512i query[N];
        for (int n = 0; n < N; ++n) query[n] = _mm512_loadu_si512(codes + (int64_t{j} * lanes + (first + n) * kLanes) * 4);
        for (int i = 0; i < kTogether; ++i) {
            const uint8_t* from = items[i] + int64_t{j} * padded_components * 4;
            if constexpr (PX < kLanes) {
                const __m512i item = repeat<PX>(from);
                for (int n = 0; n < N; ++n) acc[i][n] = _mm512_dpbusd_epi32(acc[i][n], item, query[n]);
            } else {
                for (int n = 0; n < N; ++n) {
                    const __m512i item = repeat<PX>(from + ((first + n) % blocks) * kLanes * 4);
                    acc[i][n] = _mm512_dpbusd_epi32(acc[i][n], item, query[n]);
                }
            }
        }
    }
    for (int i = 0; i < kTogether; ++i)
        for (int n = 0; n < N; ++n) _mm512_storeu_si512(out + i * lanes + (first + n) * kLanes, acc[i][n]);
#else
    for (int i = 0; i < kTogether; ++i) {
        int32_t* target = out + i * lanes + first * kLanes;
        std::copy_n(corrections + first * kLanes, N * kLanes, target);
        for (int j = 0; j < quads; ++j) {
            const uint8_t* from = items[i] + int64_t{j} * padded_components * 4;
            const int8_t* query = codes + (int64_t{j} * lanes + first * kLanes) * 4;
            for (int lane = 0; lane < N * kLanes; ++lane) {
                const uint8_t* item = from + ((first * kLanes + lane) % padded_components) * 4;
                int32_t part = 0;
                for (int b = 0; b < 4; ++b) part += int32_t{item[b]} * int32_t{query[lane * 4 + b]};
                target[lane] += part;
            }
        }
    }
#endif
}

template <int PX>
void all_dots(const uint8_t* const* items, const int8_t* codes, const int32_t* corrections, int vectors, int quads,
              int padded_components, int32_t* out) {
    int first = 0;
    for (; first + 4 <= vectors; first += 4)
        dots<PX, 4>(items, codes, corrections, first, vectors, quads, padded_components, out);
    if (first + 2 <= vectors) {
        dots<PX, 2>(items, codes, corrections, first, vectors, quads, padded_components, out);
        first += 2;
    }
    if (first < vectors) dots<PX, 1>(items, codes, corrections, first, vectors, quads, padded_components, out);
}

using AllDots = void (*)(const uint8_t* const*, const int8_t*, const int32_t*, int, int, int, int32_t*);

AllDots choose(int padded_components) {
    switch (padded_components) {
        case 1: return all_dots<1>;
        case 2: return all_dots<2>;
        case 4: return all_dots<4>;
        case 8: return all_dots<8>;
        default: return all_dots<kLanes>;
    }
}

inline bool is_allowed(const uint8_t* allowed, int64_t stride, int64_t query, int64_t item) {
    return allowed == nullptr || allowed[query * stride + item] != 0;
}

// What one worker counts: items whose gate intervals were tested, per query.
struct Counts {
    std::vector<int64_t> tested;
};

void add_counts(const std::vector<Counts>& workers, int num_queries, int64_t* tested) {
    for (int b = 0; b < num_queries; ++b) {
        tested[b] = 0;
        for (const Counts& counts : workers) tested[b] += counts.tested[b];
    }
}

}  // namespace

extern "C" {

// Marks in `kept` (B, ceil(X / 64)) the items whose s can reach the threshold, by int8 codes. `allowed` (X,) or (B, X)
// with `allowed_stride` 0 or X, or null. `tested` (B,): items that came as far as the gate intervals.
// `network` null: gates have no part that depends on the cosines.
void freshet_bounds(const FreshetItems* items, const FreshetQueries* queries, const FreshetNetwork* network,
                    const uint8_t* allowed, int64_t allowed_stride, uint64_t* kept, int64_t* tested, int threads) {
    const int vectors = items->vectors, lanes = vectors * kLanes, quads = items->quads;
    const int64_t words = (items->num_items + kTile - 1) / kTile;
    const int64_t item_bytes = int64_t{quads} * items->padded_components * 4;
    const AllDots all_items = choose(items->padded_components);
    std::vector<Counts> workers(threads, Counts{std::vector<int64_t>(queries->num_queries, 0)});
    freshet::parallel_tiles(words, threads, [&](int64_t word, int worker) {
        const int64_t start = word * kTile, stop = std::min(start + kTile, items->num_items);
        Workspace work(lanes, network == nullptr ? 0 : network->hidden_vectors * kLanes);
        Aligned<int32_t> integers(kTogether * lanes);
        for (int64_t b = 0; b < queries->num_queries; ++b) {
            const float* scalars = queries->scalars + b * 8;
            const float* scales = queries->scales + b * lanes;
            const float* outside = queries->outside + b * lanes;
            uint64_t bits = 0;
            for (int64_t x = start; x < stop; x += kTogether) {
                const uint8_t* rows[kTogether];
                bool wanted[kTogether], any = false;
                for (int i = 0; i < kTogether; ++i) {
                    rows[i] = items->codes + std::min(x + i, stop - 1) * item_bytes;
                    wanted[i] = x + i < stop && is_allowed(allowed, allowed_stride, b, x + i);
                    any |= wanted[i];
                }
                if (!any) continue;
                all_items(rows, queries->codes + b * quads * lanes * 4, queries->corrections + b * lanes, vectors,
                          quads, items->padded_components, integers.data());
                for (int i = 0; i < kTogether; ++i) {
                    if (!wanted[i]) continue;
                    const int64_t item = x + i;
                    const float threshold = scalars[0] - (scalars[1] + scalars[2] * items->component_errors[item]);
                    const Floats item_scale = all(items->scales[item]);
                    float* cosines = work.cosines.data() + work.count * lanes;
                    Floats best = all(-INFINITY);
                    for (int v = 0; v < vectors; ++v) {
                        const Floats integer =
                            __builtin_convertvector(load(integers.data() + i * lanes + v * kLanes), Floats);
                        const Floats cosine = integer * load(scales + v * kLanes) * item_scale;
                        store(cosines + v * kLanes, cosine);
                        best = larger(best, cosine + load(outside + v * kLanes));
                    }
                    if (largest(best) < threshold) continue;
                    if (!queries->gated) {
                        bits |= uint64_t{1} << (item - start);
                        continue;
                    }
                    ++workers[worker].tested[b];
                    work.items[work.count] = item;
                    work.thresholds[work.count] = threshold;
                    work.norm_errors[work.count++] = scalars[3] + scalars[4] * items->item_errors[item];
                    if (work.count == kTogether) settle(*items, *queries, network, b, start, work, bits);
                }
            }
            if (work.count > 0) settle(*items, *queries, network, b, start, work, bits);
            kept[b * words + word] = bits;
        }
    });
    add_counts(workers, queries->num_queries, tested);
}

// Rows of the set bits of one query's `words` words, ascending; `rows` has room for all of them.
int64_t freshet_list_rows(const uint64_t* kept, int64_t words, int64_t* rows) {
    int64_t found = 0;
    for (int64_t word = 0; word < words; ++word)
        for (uint64_t bits = kept[word]; bits != 0; bits &= bits - 1) rows[found++] = word * 64 + __builtin_ctzll(bits);
    return found;
}

// The `size` best allowed items of each query by int8 averages: codes (ceil(X / 16), d4, 16, 4) unsigned, queries
// (B, d4, 4) signed, corrections (B,). rows (B, size) with -1 beyond the end, unordered: a pool needs no order.
void freshet_best_averages(const uint8_t* codes, int64_t num_items, int quads, const int8_t* queries,
                           const int32_t* corrections, int num_queries, const uint8_t* allowed, int64_t allowed_stride,
                           int64_t size, int64_t* rows, int threads) {
    struct Found {
        int32_t score;
        int32_t row;
    };
    struct Best {
        std::vector<Found> found;
        int32_t floor = INT32_MIN;
    };
    constexpr int64_t kBlocks = 64;
    const auto before = [](const Found& a, const Found& b) {
        return a.score != b.score ? a.score > b.score : a.row < b.row;
    };
    const int64_t blocks = (num_items + kLanes - 1) / kLanes;
    threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, blocks / (4 * kBlocks))));
    std::vector<std::vector<Best>> best(threads, std::vector<Best>(num_queries));
    freshet::parallel_tiles((blocks + kBlocks - 1) / kBlocks, threads, [&](int64_t tile, int worker) {
        const int64_t last = std::min(blocks, (tile + 1) * kBlocks);
        for (int64_t b = 0; b < num_queries; ++b) {
            Best& mine = best[worker][b];
            const int8_t* query = queries + b * quads * 4;
            for (int64_t block = tile * kBlocks; block < last; ++block) {
                const uint8_t* from = codes + block * quads * kLanes * 4;
                Ints scores = corrections[b] - Ints{};
#if defined(__AVX512VNNI__)
                __m512i acc = reinterpret_cast<__m512i>(scores);
                for (int j = 0; j < quads; ++j) {
                    int32_t value;
                    std::memcpy(&value, query + j * 4, 4);
                    acc = _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(from + j * 64), _mm512_set1_epi32(value));
                }
                scores = reinterpret_cast<Ints>(acc);
                const Ints over = scores > mine.floor;
                if (_mm512_test_epi32_mask(reinterpret_cast<__m512i>(over), reinterpret_cast<__m512i>(over)) == 0)
                    continue;
#else
                for (int j = 0; j < quads; ++j)
                    for (int lane = 0; lane < kLanes; ++lane)
                        for (int byte = 0; byte < 4; ++byte)
                            scores[lane] += int32_t{from[(j * kLanes + lane) * 4 + byte]} * query[j * 4 + byte];
#endif
                const int64_t count = std::min<int64_t>(kLanes, num_items - block * kLanes);
                for (int64_t lane = 0; lane < count; ++lane) {
                    const int64_t item = block * kLanes + lane;
                    if (scores[lane] <= mine.floor || !is_allowed(allowed, allowed_stride, b, item)) continue;
                    mine.found.push_back({scores[lane], static_cast<int32_t>(item)});
                }
                if (static_cast<int64_t>(mine.found.size()) >= 2 * size + kLanes) {
                    std::nth_element(mine.found.begin(), mine.found.begin() + size - 1, mine.found.end(), before);
                    mine.found.resize(size);
                    mine.floor = mine.found.back().score;
                }
            }
        }
    });
    for (int64_t b = 0; b < num_queries; ++b) {
        std::vector<Found> together;
        for (const auto& worker : best) together.insert(together.end(), worker[b].found.begin(), worker[b].found.end());
        const int64_t taken = std::min<int64_t>(size, together.size());
        if (taken < static_cast<int64_t>(together.size()))
            std::nth_element(together.begin(), together.begin() + taken, together.end(), before);
        for (int64_t i = 0; i < size; ++i) rows[b * size + i] = i < taken ? together[i].row : -1;
    }
}

}  // extern "C"
