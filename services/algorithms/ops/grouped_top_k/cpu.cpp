// The N best items of each of many query components at once, without storing the dot products.
//
// A panel of 64 items is brought into cache as (d, 64) floats (stored so, or widened from bfloat16, or transposed from
// rows), every query vector is multiplied with it in registers, and only what reaches that vector's running threshold
// is written down: 8 bytes, in order of (-score, row). A full buffer is cut back to its N + 1 best, which raises the
// threshold. Workers take panels in turn, each with buffers of its own, and raise each other's thresholds.
//
// Where X is large against N, thresholds start at a guess from every 64th panel, low enough that more than N items
// reach it all but surely; where too few did, the scan is repeated without.
//
// Letters: B queries, Q vectors per query, X items, S item components (groups), d width, N results per (vector, group).
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "parallel.hpp"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kBlock = 6;  // query vectors per pass: 6 x 4 accumulators of 32 registers
constexpr int kVectors = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kBlock = 6;  // 6 x 2 of 16 registers
constexpr int kVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kBlock = 6;
constexpr int kVectors = 2;
#endif
constexpr int kPanel = 64;
constexpr int64_t kStride = 64;      // one panel of so many makes the sample
constexpr int64_t kLarge = 1 << 16;  // items from which the sample's thresholds pay
constexpr int kSlice = kLanes * kVectors;  // items per pass of the inner loop; a panel is one or more slices

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourIndices __attribute__((vector_size(16)));

template <typename Vector>
inline Vector load(const float* from) {
    Vector out;
    std::memcpy(&out, from, sizeof(out));
    return out;
}

template <typename Vector>
inline void store(float* to, const Vector& value) {
    std::memcpy(to, &value, sizeof(value));
}

// Bit i is set where lane i is at least the threshold.
inline uint64_t at_least(const Floats& scores, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<const __m512&>(scores), _mm512_set1_ps(threshold), _CMP_GE_OQ);
#elif defined(__AVX2__)
    const __m256 reached = _mm256_cmp_ps(reinterpret_cast<const __m256&>(scores), _mm256_set1_ps(threshold), _CMP_GE_OQ);
    return static_cast<uint32_t>(_mm256_movemask_ps(reached));
#else
    uint64_t bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint64_t>(scores[lane] >= threshold) << lane;
    return bits;
#endif
}

// Bit i is set where byte i of 64 is not zero.
inline uint64_t nonzero_bytes(const uint8_t* bytes) {
    uint64_t bits = 0;
    for (int eight = 0; eight < 8; ++eight) {
        uint64_t word;
        std::memcpy(&word, bytes + 8 * eight, 8);
        // Bytes are 0 or 1: the product gathers the eight low bits, byte 0 first, into the top byte.
        bits |= ((word & 0x0101010101010101u) * 0x0102040810204080u >> 56) << (8 * eight);
    }
    return bits;
}

// A float as an integer of the same order, -0 equal to +0.
inline uint32_t ordered(float score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float unordered(uint32_t key) { return std::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Larger is better: score first, then the smaller row.
inline uint64_t key_of(float score, uint32_t row) {
    return static_cast<uint64_t>(ordered(score)) << 32 | static_cast<uint32_t>(~row);
}

// One worker's candidates for one (vector, group).
struct Sink {
    uint64_t* keys;
    int64_t count = 0;
};

inline void raise_to(std::atomic<float>& shared, float value) {
    float seen = shared.load(std::memory_order_relaxed);
    while (seen < value && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
}

// Keeps the N + 1 best of more. What is below the (N + 1)-th best of one worker is below the (N + 1)-th best of all.
void cut(Sink& sink, int64_t size, std::atomic<float>& shared) {
    std::nth_element(sink.keys, sink.keys + size, sink.keys + sink.count, std::greater<>());
    raise_to(shared, unordered(static_cast<uint32_t>(sink.keys[size] >> 32)));
    sink.count = size + 1;
}

struct Scan {
    const void* items;
    int layout;  // 0: float32 rows (X, S, d); 1: float32 panels (X / 64, S, d, 64); 2: bfloat16 panels of that shape
    int64_t num_items, groups, width;
    const float* queries;  // (B, Q, d)
    int64_t num_queries, vectors;
    const uint8_t* allowed;  // (B, X), (X,) with stride 0, or null
    int64_t allowed_stride;
    int64_t size, capacity;
};

// Four rows of four floats as columns.
inline void transpose4(const float* const* rows, int64_t k, float* to) {
    const Four a = load<Four>(rows[0] + k), b = load<Four>(rows[1] + k);
    const Four c = load<Four>(rows[2] + k), e = load<Four>(rows[3] + k);
    const Four ab_low = __builtin_shuffle(a, b, FourIndices{0, 4, 1, 5});
    const Four ab_high = __builtin_shuffle(a, b, FourIndices{2, 6, 3, 7});
    const Four ce_low = __builtin_shuffle(c, e, FourIndices{0, 4, 1, 5});
    const Four ce_high = __builtin_shuffle(c, e, FourIndices{2, 6, 3, 7});
    store(to, __builtin_shuffle(ab_low, ce_low, FourIndices{0, 1, 4, 5}));
    store(to + kPanel, __builtin_shuffle(ab_low, ce_low, FourIndices{2, 3, 6, 7}));
    store(to + 2 * kPanel, __builtin_shuffle(ab_high, ce_high, FourIndices{0, 1, 4, 5}));
    store(to + 3 * kPanel, __builtin_shuffle(ab_high, ce_high, FourIndices{2, 3, 6, 7}));
}

// One group of a panel as (d, 64) floats: where it lies, or written to `scratch`. Lanes beyond X hold anything finite.
const float* panel_of(const Scan& scan, int64_t panel, int64_t group, float* scratch) {
    const int64_t offset = (panel * scan.groups + group) * scan.width * kPanel;
    if (scan.layout == 1) return static_cast<const float*>(scan.items) + offset;
    if (scan.layout == 2) {
        const uint16_t* from = static_cast<const uint16_t*>(scan.items) + offset;
        uint32_t* to = reinterpret_cast<uint32_t*>(scratch);
        for (int64_t i = 0; i < scan.width * kPanel; ++i) to[i] = static_cast<uint32_t>(from[i]) << 16;
        return scratch;
    }
    const float* items = static_cast<const float*>(scan.items);
    for (int lane = 0; lane < kPanel; lane += 4) {
        const float* rows[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t item = std::min(panel * kPanel + lane + i, scan.num_items - 1);
            rows[i] = items + (item * scan.groups + group) * scan.width;
        }
        int64_t k = 0;
        for (; k + 4 <= scan.width; k += 4) transpose4(rows, k, scratch + k * kPanel + lane);
        for (; k < scan.width; ++k)
            for (int i = 0; i < 4; ++i) scratch[k * kPanel + lane + i] = rows[i][k];
    }
    return scratch;
}

// Dot products of `count` query vectors with the items of a slice, one running sum per item: the order of summation,
// and so every bit of a score, is the same wherever an item lies.
template <int Count>
inline void dot(const float* slice, const float* query, int64_t width, Floats (&sums)[kBlock][kVectors]) {
    Floats local[Count][kVectors] = {};
    for (int64_t k = 0; k < width; ++k) {
        Floats item[kVectors];
        for (int v = 0; v < kVectors; ++v) item[v] = load<Floats>(slice + k * kPanel + v * kLanes);
        for (int j = 0; j < Count; ++j)
            for (int v = 0; v < kVectors; ++v) local[j][v] += item[v] * query[j * width + k];
    }
    for (int j = 0; j < Count; ++j)
        for (int v = 0; v < kVectors; ++v) sums[j][v] = local[j][v];
}

inline void dots(int count, const float* slice, const float* query, int64_t width, Floats (&sums)[kBlock][kVectors]) {
    switch (count) {
        case 1: return dot<1>(slice, query, width, sums);
        case 2: return dot<2>(slice, query, width, sums);
        case 3: return dot<3>(slice, query, width, sums);
        case 4: return dot<4>(slice, query, width, sums);
        case 5: return dot<5>(slice, query, width, sums);
        default: return dot<kBlock>(slice, query, width, sums);
    }
}

// Writes down what reaches the threshold among the items of one slice.
inline void collect(const Scan& scan, Sink& sink, std::atomic<float>& shared, const Floats (&scores)[kVectors],
                    uint64_t allowed, int64_t first_item) {
    const float threshold = shared.load(std::memory_order_relaxed);
    uint64_t reached = 0;
    for (int v = 0; v < kVectors; ++v) reached |= at_least(scores[v], threshold) << (v * kLanes);
    reached &= allowed;
    if (!reached) return;
    if (sink.count + kSlice > scan.capacity) cut(sink, scan.size, shared);
    alignas(64) float spilled[kSlice];
    for (int v = 0; v < kVectors; ++v) store(spilled + v * kLanes, scores[v]);
    uint64_t* to = sink.keys + sink.count;
    sink.count += std::popcount(reached);
    for (; reached; reached &= reached - 1) {
        const int lane = std::countr_zero(reached);
        *to++ = key_of(spilled[lane], static_cast<uint32_t>(first_item + lane));
    }
}

void scan_panel(const Scan& scan, int64_t panel, float* scratch, uint64_t* masks, Sink* sinks,
                std::atomic<float>* shared) {
    const int64_t first = panel * kPanel, items = std::min<int64_t>(kPanel, scan.num_items - first);
    const uint64_t present = items == kPanel ? ~uint64_t{0} : (uint64_t{1} << items) - 1;
    uint64_t anything = 0;
    for (int64_t b = 0; b < scan.num_queries; ++b) {
        masks[b] = present;
        if (scan.allowed && (b == 0 || scan.allowed_stride)) {
            const uint8_t* row = scan.allowed + b * scan.allowed_stride + first;
            uint8_t padded[kPanel] = {};
            if (items < kPanel) row = static_cast<const uint8_t*>(std::memcpy(padded, row, items));
            masks[b] = nonzero_bytes(row);
        } else if (scan.allowed) {
            masks[b] = masks[0];
        }
        anything |= masks[b];
    }
    if (!anything) return;
    const int64_t rows = scan.num_queries * scan.vectors;
    const uint64_t slice_mask = kSlice == 64 ? ~uint64_t{0} : (uint64_t{1} << (kSlice % 64)) - 1;
    for (int64_t group = 0; group < scan.groups; ++group) {
        const float* data = panel_of(scan, panel, group, scratch);
        for (int64_t row = 0; row < rows; row += kBlock) {
            const int count = static_cast<int>(std::min<int64_t>(kBlock, rows - row));
            uint64_t wanted = 0;
            for (int j = 0; j < count; ++j) wanted |= masks[(row + j) / scan.vectors];
            if (!wanted) continue;
            for (int slice = 0; slice < kPanel; slice += kSlice) {
                if (!(wanted >> slice & slice_mask)) continue;
                Floats sums[kBlock][kVectors];
                dots(count, data + slice, scan.queries + row * scan.width, scan.width, sums);
                for (int j = 0; j < count; ++j) {
                    const int64_t place = (row + j) * scan.groups + group;
                    const uint64_t mask = masks[(row + j) / scan.vectors] >> slice & slice_mask;
                    collect(scan, sinks[place], shared[place], sums[j], mask, first + slice);
                }
            }
        }
    }
}

}  // namespace

// The N best of every (query vector, group), by (-score, row), and the best score left out.
//
// queries (B, Q, d); items as in Scan; allowed (B, X) or (X,) bytes of 0 and 1, stride X or 0. out_rows and out_scores
// (B, Q, S, N), filled from the left and left alone beyond what is allowed; out_next (B, Q, S): the (N + 1)-th best
// score, left alone where no more than N items are allowed.
extern "C" void freshet_grouped_top_k(const void* items, int layout, int64_t num_items, int64_t groups, int64_t width,
                                      const float* queries, int64_t num_queries, int64_t vectors,
                                      const uint8_t* allowed, int64_t allowed_stride, int64_t size, int64_t* out_rows,
                                      float* out_scores, float* out_next, int threads) {
    const int64_t places = num_queries * vectors * groups;
    const int64_t capacity = 2 * (size + 1) + kPanel;
    const Scan scan{items,   layout,  num_items,      groups, width,   queries, num_queries,
                    vectors, allowed, allowed_stride, size,   capacity};
    threads = static_cast<int>(std::clamp<int64_t>(num_items * places * width >> 18, 1, threads));
    std::unique_ptr<uint64_t[]> buffers(new uint64_t[threads * places * capacity]);
    std::vector<Sink> sinks(threads * places);
    for (int64_t i = 0; i < threads * places; ++i) sinks[i].keys = buffers.get() + i * capacity;
    std::vector<std::atomic<float>> shared(places);
    std::vector<float> scratch(layout == 1 ? 0 : threads * width * kPanel);
    std::vector<uint64_t> masks(threads * num_queries);

    // Scans every `stride`-th panel, keeping what reaches `shared`.
    const auto run = [&](const Scan& what, int64_t stride) {
        for (Sink& sink : sinks) sink.count = 0;
        const int64_t panels = (num_items + kPanel * stride - 1) / (kPanel * stride);
        // A chunk of panels at a time: handing out single ones would bounce the counter's cache line.
        const int64_t chunk = std::clamp<int64_t>(panels / (8 * threads), 1, 64);
        freshet::parallel_tiles((panels + chunk - 1) / chunk, threads, [&](int64_t tile, int worker) {
            const int64_t last = std::min(panels, (tile + 1) * chunk);
            for (int64_t panel = tile * chunk; panel < last; ++panel)
                scan_panel(what, panel * stride, scratch.data() + (layout == 1 ? 0 : worker * width * kPanel),
                           masks.data() + worker * num_queries, sinks.data() + worker * places, shared.data());
        });
    };
    const auto kept = [&](int64_t place) {
        std::vector<uint64_t> keys;
        for (int worker = 0; worker < threads; ++worker) {
            const Sink& sink = sinks[worker * places + place];
            keys.insert(keys.end(), sink.keys, sink.keys + sink.count);
        }
        return keys;
    };

    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    std::vector<float> started(places, kLowest);
    for (auto& one : shared) one.store(kLowest, std::memory_order_relaxed);
    if (num_items >= kLarge && size < num_items / 16) {
        // Of the N + 1 best a sample holds (N + 1) / stride, give or take a standard deviation; four are allowed for.
        const double expected = static_cast<double>(size + 1) / kStride;
        Scan sample = scan;
        sample.size = static_cast<int64_t>(expected + 4 * std::sqrt(expected)) + 1;
        run(sample, kStride);
        for (int64_t place = 0; place < places; ++place) {
            std::vector<uint64_t> keys = kept(place);
            if (static_cast<int64_t>(keys.size()) > sample.size) {
                std::nth_element(keys.begin(), keys.begin() + sample.size, keys.end(), std::greater<>());
                started[place] = unordered(static_cast<uint32_t>(keys[sample.size] >> 32));
            }
            shared[place].store(started[place], std::memory_order_relaxed);
        }
    }
    run(scan, 1);

    std::vector<char> missed(places);
    const auto write = [&](int64_t place, int) {
        std::vector<uint64_t> keys = kept(place);
        missed[place] = started[place] > kLowest && static_cast<int64_t>(keys.size()) <= size;
        if (missed[place]) return;
        const int64_t found = std::min<int64_t>(size, keys.size());
        if (static_cast<int64_t>(keys.size()) > size) {
            std::nth_element(keys.begin(), keys.begin() + size, keys.end(), std::greater<>());
            out_next[place] = unordered(static_cast<uint32_t>(keys[size] >> 32));
        }
        std::sort(keys.begin(), keys.begin() + found, std::greater<>());
        for (int64_t i = 0; i < found; ++i) {
            out_rows[place * size + i] = ~static_cast<uint32_t>(keys[i]);
            out_scores[place * size + i] = unordered(static_cast<uint32_t>(keys[i] >> 32));
        }
    };
    freshet::parallel_tiles(places, threads, write);
    if (std::count(missed.begin(), missed.end(), 1)) {
        for (int64_t place = 0; place < places; ++place)
            shared[place].store(missed[place] ? kLowest : -kLowest, std::memory_order_relaxed);
        run(scan, 1);
        for (int64_t place = 0; place < places; ++place) {
            started[place] = kLowest;
            if (missed[place]) write(place, 0);
        }
    }
}
