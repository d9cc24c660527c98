// Top-K over vectors kept as small integer codes in cells: coarse scores, cell choice, scan, selection and exact
// re-evaluation in one call, so that a query of 0.1 ms isn't spent in an interpreter.
//
// A cell holds residuals x - centre as unsigned integers around `zero`, in blocks of 16 items, 4 dimensions of all 16
// per 64 bytes (4-bit codes: 8 dimensions, the second four in the high nibbles). A score is
// base + unit * (sum of code * query code - zero * sum of query codes); the comparison with the running threshold is
// made in integers, and only survivors ever become floats. The 16-lane integer dot product is what differs by
// instruction set (VNNI's vpdpbusd, AVX2's vpmaddwd, plain loops); the rest is written in vectors of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "parallel.hpp"

namespace {

using Floats = float __attribute__((vector_size(64), aligned(4)));
using Ints = int32_t __attribute__((vector_size(64), aligned(4)));
using Floats8 = float __attribute__((vector_size(32), aligned(4)));
using Doubles8 = double __attribute__((vector_size(64)));

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kUnit = 0x1p-24;  // float32 roundoff

Floats all(float value) { return value - Floats{}; }

}  // namespace

// Mirrored by services/algorithms/ops/quantized_scan/__init__.py.
struct FreshetCells {
    int64_t num_items, num_cells, width, coded_width, num_groups, bits;
    const float* centres;    // (ceil(C / 16), d, 16), zeros beyond the last cell
    const float* spreads;    // (16 * ceil(C / 16),): root mean square residual norm
    const float* radii;      // (16 * ceil(C / 16),): largest residual norm, rounded up
    const float* scales;     // (C,): what one step of a code is worth
    const float* errors;     // (C,): largest norm of a residual minus its code, rounded up
    const float* code_norms; // (C,): largest norm of a decoded residual, rounded up
    const int64_t* counts;   // (C,) items
    const int64_t* starts;   // (C + 1,) in blocks
    const int32_t* rows;     // (16 * blocks,): item row, -1 beyond the end of a cell
    const uint8_t* codes;    // (blocks, num_groups, 64)
    const float* vectors;    // (X, d), what is re-evaluated
    const float* projection; // (d, h), or null: the coordinates as they are, h = d
    double largest_error, largest_code_norm, largest_centre_norm;
};

struct FreshetSearch {
    int64_t num_queries, k, pool, probes;
    int64_t prove;    // keep whatever may belong to the top k, skip only cells that cannot
    int64_t rescore;  // answer with exact products instead of those of the codes
    float reach;
    const float* queries;  // (B, d)
    const double* tolerances;  // (B,): exact products closer than this count as equal
    const uint8_t* allowed;    // (X,) per query at this stride, or null
    int64_t allowed_stride;
    int64_t* out_rows;     // (B, width)
    double* out_scores;    // (B, width)
    int64_t out_stride;
    double* bounds;        // (B,): nothing left out scores above it; -inf when nothing was left out
    const int64_t* num_allowed;  // (B,)
    int64_t* touched;            // (B, 2): items scanned, products re-evaluated
};

namespace {

using Cells = FreshetCells;
using Search = FreshetSearch;

int64_t count_at_least(const float* values, int64_t padded, float threshold) {
    Ints count = {};
    const Floats limit = all(threshold);
    for (int64_t i = 0; i < padded; i += kLanes) count -= *(const Floats*)(values + i) >= limit;
    int64_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += count[lane];
    return total;
}

// A threshold that `wanted` to `wanted + slack` values reach, by bisection (a pass over 400 values takes 10 ns, where
// nth_element mispredicts its way through 3 us); more where values are equal. `padded` is a multiple of 16, padding is
// -inf; at least `wanted` values are finite.
float threshold_for(const float* values, int64_t padded, int64_t wanted, int64_t slack) {
    Floats largest = all(-kInfinity), smallest = all(kInfinity);
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Floats value = *(const Floats*)(values + i);
        largest = largest > value ? largest : value;
        const Floats finite = value > all(-kInfinity) ? value : all(kInfinity);
        smallest = smallest < finite ? smallest : finite;
    }
    float low = kInfinity, high = -kInfinity;
    for (int lane = 0; lane < kLanes; ++lane) {
        low = std::min(low, smallest[lane]);
        high = std::max(high, largest[lane]);
    }
    high = std::nextafter(high, kInfinity);
    for (int step = 0; step < 40; ++step) {
        const float middle = low + 0.5f * (high - low);
        if (!(middle > low && middle < high)) break;
        const int64_t count = count_at_least(values, padded, middle);
        if (count < wanted) {
            high = middle;
        } else {
            low = middle;
            if (count <= wanted + slack) break;
        }
    }
    return low;
}

// ---- 16 integer dot products -------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <int kBits, int kGroups>
inline Ints block_products(const uint8_t* codes, const int32_t* query, int64_t num_groups) {
    const int64_t groups = kGroups ? kGroups : num_groups;
    __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
    if constexpr (kBits == 8) {
        int64_t g = 0;
        for (; g + 2 <= groups; g += 2) {
            even = _mm512_dpbusd_epi32(even, _mm512_loadu_si512(codes + g * 64), _mm512_set1_epi32(query[g]));
            odd = _mm512_dpbusd_epi32(odd, _mm512_loadu_si512(codes + g * 64 + 64), _mm512_set1_epi32(query[g + 1]));
        }
        if (g < groups) {
            even = _mm512_dpbusd_epi32(even, _mm512_loadu_si512(codes + g * 64), _mm512_set1_epi32(query[g]));
        }
    } else {
        const __m512i nibble = _mm512_set1_epi8(15);
        for (int64_t g = 0; g < groups; ++g) {
            const __m512i both = _mm512_loadu_si512(codes + g * 64);
            const __m512i low = _mm512_and_si512(both, nibble);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            even = _mm512_dpbusd_epi32(even, low, _mm512_set1_epi32(query[2 * g]));
            odd = _mm512_dpbusd_epi32(odd, high, _mm512_set1_epi32(query[2 * g + 1]));
        }
    }
    return (Ints)_mm512_add_epi32(even, odd);
}
#elif defined(__AVX2__)
template <int kBits, int kGroups>
inline Ints block_products(const uint8_t* codes, const int32_t* query, int64_t num_groups) {
    const int64_t groups = kGroups ? kGroups : num_groups;
    __m256i sums[4] = {};  // 4 items each, two halves of a group's product per item
    const auto add = [&](const uint8_t* four, int32_t packed) {
        const __m256i weights = _mm256_cvtepi8_epi16(_mm_set1_epi32(packed));
        for (int part = 0; part < 4; ++part) {
            const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(four + 16 * part)));
            sums[part] = _mm256_add_epi32(sums[part], _mm256_madd_epi16(wide, weights));
        }
    };
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* block = codes + g * 64;
        if constexpr (kBits == 8) {
            add(block, query[g]);
        } else {
            alignas(32) uint8_t low[64], high[64];
            const __m256i nibble = _mm256_set1_epi8(15);
            for (int part = 0; part < 64; part += 32) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(block + part));
                _mm256_store_si256((__m256i*)(low + part), _mm256_and_si256(both, nibble));
                _mm256_store_si256((__m256i*)(high + part), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
            }
            add(low, query[2 * g]);
            add(high, query[2 * g + 1]);
        }
    }
    Ints products;
    for (int part = 0; part < 4; ++part) {
        alignas(32) int32_t halves[8];
        _mm256_store_si256((__m256i*)halves, sums[part]);
        for (int item = 0; item < 4; ++item) products[4 * part + item] = halves[2 * item] + halves[2 * item + 1];
    }
    return products;
}
#else
template <int kBits, int kGroups>
inline Ints block_products(const uint8_t* codes, const int32_t* query, int64_t num_groups) {
    const int64_t groups = kGroups ? kGroups : num_groups;
    int32_t products[kLanes] = {};
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* block = codes + g * 64;
        int8_t low[4], high[4];
        std::memcpy(low, query + (kBits == 8 ? g : 2 * g), 4);
        if constexpr (kBits == 4) std::memcpy(high, query + 2 * g + 1, 4);
        for (int lane = 0; lane < kLanes; ++lane) {
            for (int j = 0; j < 4; ++j) {
                const int32_t code = block[4 * lane + j];
                if constexpr (kBits == 8) {
                    products[lane] += code * low[j];
                } else {
                    products[lane] += (code & 15) * low[j] + (code >> 4) * high[j];
                }
            }
        }
    }
    Ints out;
    std::memcpy(&out, products, sizeof out);
    return out;
}
#endif

// The lanes of a comparison's outcome, as bits.
inline uint32_t lanes_of(Ints mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#else
    int64_t words[8], any = 0;
    std::memcpy(words, &mask, sizeof words);
    for (const int64_t word : words) any |= word;
    if (!any) return 0;
    uint32_t bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) bits |= (mask[lane] & 1u) << lane;
    return bits;
#endif
}

// ---- one query -----------------------------------------------------------------------------------------------------

struct Ranked {
    float key;
    int32_t cell;
};

// What a query carries from cell to cell: its codes, the cells it still may visit, and the best candidates so far.
struct Query {
    const Cells* cells;
    const Search* search;
    const float* vector;
    const uint8_t* allowed;
    double norm, code_error;
    float unit;
    int32_t code_sum;
    std::vector<float> projected;
    std::vector<int32_t> codes;            // four int8 each
    std::vector<float> bases, keys;        // of cells; a key of -inf: visited
    std::vector<Ranked> tier;              // the cells to visit next, best first
    std::vector<float> scores, lows;       // candidates: score (upper bound when proving), lower bound (when proving)
    std::vector<int32_t> slots;
    int64_t count, capacity, visited, scanned, wanted;
    int64_t ripe;                          // as many candidates are worth a cut
    float threshold;                       // candidates below it are left out
    bool done;                             // no more cells to visit

    void begin(const Cells& all_cells, const Search& options, int64_t number) {
        cells = &all_cells;
        search = &options;
        vector = options.queries + number * all_cells.width;
        allowed = options.allowed ? options.allowed + number * options.allowed_stride : nullptr;
        encode();
        score_cells();
        wanted = std::min(search->prove ? search->k : search->pool, search->num_allowed[number]);
        capacity = std::max<int64_t>(2 * wanted, wanted + 512);
        resize();
        count = visited = scanned = 0;
        done = false;
        threshold = -kInfinity;
        ripe = wanted + wanted / 4;
    }

    void resize() {
        scores.resize(capacity + kLanes);
        slots.resize(capacity + kLanes);
        if (search->prove) lows.resize(capacity + kLanes);
    }

    void encode() {
        double square = 0;
        for (int64_t j = 0; j < cells->width; ++j) square += (double)vector[j] * vector[j];
        norm = std::sqrt(square);
        const float* coded = vector;
        if (cells->projection) {
            project();
            coded = projected.data();
        }
        float largest = 0;
        for (int64_t j = 0; j < cells->coded_width; ++j) largest = std::max(largest, std::fabs(coded[j]));
        unit = largest > 0 ? largest / 127 : 1;
        const int64_t words = cells->num_groups * (cells->bits == 8 ? 1 : 2);
        codes.assign(words, 0);
        int8_t* bytes = (int8_t*)codes.data();
        code_sum = 0;
        double error = 0;
        for (int64_t j = 0; j < cells->coded_width; ++j) {
            const float code = std::clamp(std::nearbyint(coded[j] / unit), -127.0f, 127.0f);
            bytes[j] = (int8_t)code;
            code_sum += (int32_t)code;
            const double apart = (double)coded[j] - (double)code * unit;
            error += apart * apart;
        }
        code_error = std::sqrt(error);
    }

    void project() {
        const int64_t coded = cells->coded_width;
        projected.assign(coded, 0);
        constexpr int64_t kColumns = 4 * kLanes;
        int64_t j = 0;
        for (; j + kColumns <= coded; j += kColumns) {
            Floats sums[4] = {};
            for (int64_t i = 0; i < cells->width; ++i) {
                const float* row = cells->projection + i * coded + j;
                for (int part = 0; part < 4; ++part) sums[part] += vector[i] * *(const Floats*)(row + part * kLanes);
            }
            std::memcpy(projected.data() + j, sums, sizeof sums);
        }
        for (int64_t i = 0; i < cells->width; ++i) {
            for (int64_t rest = j; rest < coded; ++rest) {
                projected[rest] += vector[i] * cells->projection[i * coded + rest];
            }
        }
    }

    void score_cells() {
        const int64_t blocks = (cells->num_cells + kLanes - 1) / kLanes, width = cells->width;
        bases.resize(blocks * kLanes);
        keys.resize(blocks * kLanes);
        // When proving, a cell's key bounds whatever it holds; else it is where its better items are expected.
        const float* extents = search->prove ? cells->radii : cells->spreads;
        const float stretch = search->prove ? (float)(norm * (1 + 4 * kUnit)) : search->reach * (float)norm;
        for (int64_t b = 0; b < blocks; ++b) {
            const float* centre = cells->centres + b * width * kLanes;
            Floats sums[4] = {};
            int64_t j = 0;
            for (; j + 4 <= width; j += 4) {
                for (int part = 0; part < 4; ++part) {
                    sums[part] += vector[j + part] * *(const Floats*)(centre + (j + part) * kLanes);
                }
            }
            for (; j < width; ++j) sums[0] += vector[j] * *(const Floats*)(centre + j * kLanes);
            const Floats base = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            *(Floats*)(bases.data() + b * kLanes) = base;
            *(Floats*)(keys.data() + b * kLanes) = base + stretch * *(const Floats*)(extents + b * kLanes);
        }
        for (int64_t cell = cells->num_cells; cell < blocks * kLanes; ++cell) keys[cell] = -kInfinity;
    }

    float rounding() const {
        const double spread = cells->projection ? std::sqrt((double)cells->coded_width) : 1;
        const double magnitude = norm * (cells->largest_centre_norm + spread * cells->largest_code_norm);
        return (float)((double)(cells->width + 16) * kUnit * magnitude);
    }

    // Whether a cell with this key, and every cell with a smaller one, can be left unvisited.
    bool hopeless(float key) const {
        if (search->prove) return key + rounding() < threshold;
        return search->reach > 0 && count >= wanted && key < threshold;
    }

    // Fills `tier` with up to `most` of the best cells not yet visited; false when there is no more to visit.
    bool next_tier(int64_t most) {
        tier.clear();
        const bool full = count >= wanted;
        if (full) cut();
        // Which cells are visited must not depend on how large the tiers are: `probes`, then one by one until full.
        if (!search->prove) most = std::min(most, std::max<int64_t>(search->probes - visited, full ? 0 : 1));
        most = std::min(most, cells->num_cells - visited);
        if (most <= 0 || wanted == 0) return false;
        const int64_t padded = (int64_t)keys.size();
        const float limit = threshold_for(keys.data(), padded, most, most / 4);
        for (int64_t i = 0; i < padded; i += kLanes) {
            const Ints mask = *(const Floats*)(keys.data() + i) >= all(limit);
            for (uint32_t bits = lanes_of(mask); bits; bits &= bits - 1) {
                const int64_t cell = i + __builtin_ctz(bits);
                if (!hopeless(keys[cell])) tier.push_back({keys[cell], (int32_t)cell});
            }
        }
        std::sort(tier.begin(), tier.end(), [](const Ranked& a, const Ranked& b) {
            return a.key != b.key ? a.key > b.key : a.cell < b.cell;
        });
        if ((int64_t)tier.size() > most) tier.resize(most);
        return !tier.empty();
    }

    // Raises the threshold to the `wanted` best candidates and drops what is below.
    void cut() {
        if (count < wanted) return;
        const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
        std::vector<float>& basis = search->prove ? lows : scores;
        for (int64_t i = count; i < padded; ++i) basis[i] = -kInfinity;
        threshold = std::max(threshold, threshold_for(basis.data(), padded, wanted, wanted / 16));
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            scores[kept] = scores[i];
            slots[kept] = slots[i];
            if (search->prove) lows[kept] = lows[i];
            kept += scores[i] >= threshold;
        }
        count = kept;
        ripe = count + std::max(count, wanted) / 4;
    }

    int32_t integer_limit(float base, float step, float slack) const {
        const float steps = std::floor((threshold - slack - base) / step);
        if (!(steps > -2e9f)) return std::numeric_limits<int32_t>::min();
        const int64_t zero = (int64_t)(cells->bits == 8 ? 128 : 8) * code_sum;
        return (int32_t)std::clamp<int64_t>((int64_t)std::min(steps, 2e9f) + zero, INT32_MIN, INT32_MAX);
    }

    template <int kBits, int kGroups>
    void scan(int64_t cell, const uint8_t* next) {
        const float base = bases[cell], step = cells->scales[cell] * unit;
        const float slack = search->prove ? (float)((norm * cells->errors[cell] + code_error * cells->code_norms[cell]) *
                                                    (1 + 4 * kUnit)) + rounding()
                                          : 0;
        const int64_t first = cells->starts[cell], last = cells->starts[cell + 1], groups = cells->num_groups;
        const int64_t bytes = groups * 64;
        const Ints zero = (kBits == 8 ? 128 : 8) * code_sum - Ints{};
        if (count > ripe) cut();
        Ints limit = integer_limit(base, step, slack) - Ints{};
        keys[cell] = -kInfinity;
        ++visited;
        scanned += cells->counts[cell];
        for (int64_t block = first; block < last; ++block) {
            const uint8_t* codes_of_block = cells->codes + block * bytes;
            if (next) {
                // The next cell's codes: 1.4 times the speed of leaving it to the hardware, which starts anew per cell.
                for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(next + offset);
                next += bytes;
            }
            const Ints products = block_products<kBits, kGroups>(codes_of_block, codes.data(), groups);
            uint32_t bits = lanes_of(products >= limit);
            if (!bits) continue;
            const Ints rows = *(const Ints*)(cells->rows + block * kLanes);
            const Floats values = base + step * __builtin_convertvector(products - zero, Floats);
            for (; bits; bits &= bits - 1) {
                const int lane = __builtin_ctz(bits);
                const int32_t row = rows[lane];
                if (row < 0 || (allowed && !allowed[row])) continue;
                scores[count] = values[lane] + slack;
                slots[count] = row;
                if (search->prove) lows[count] = values[lane] - slack;
                ++count;
            }
            if (count + kLanes > capacity) {
                cut();
                if (2 * count > capacity) {
                    capacity = 4 * count;
                    resize();
                }
                limit = integer_limit(base, step, slack) - Ints{};
            }
        }
    }
};

// What is left of a query once its cells are scanned: exact products, order, bound.

struct Found {
    double score;
    int64_t row;
};

double product(const float* a, const float* b, int64_t width) {
    Doubles8 sums = {};
    int64_t j = 0;
    for (; j + 8 <= width; j += 8) {
        sums += __builtin_convertvector(*(const Floats8*)(a + j), Doubles8) *
                __builtin_convertvector(*(const Floats8*)(b + j), Doubles8);
    }
    double total = 0;
    for (; j < width; ++j) total += (double)a[j] * b[j];
    for (int lane = 0; lane < 8; ++lane) total += sums[lane];
    return total;
}

// Not a function, whose address a sort would call.
constexpr auto better = [](const Found& a, const Found& b) {
    return a.score != b.score ? a.score > b.score : a.row < b.row;
};

// Best first, ties by row; scores that a chain of steps of at most `tolerance` connects count as equal.
void order(std::vector<Found>& found, double tolerance) {
    std::sort(found.begin(), found.end(), better);
    if (tolerance <= 0) return;
    for (size_t first = 0, last; first < found.size(); first = last) {
        for (last = first + 1; last < found.size(); ++last) {
            if (found[last - 1].score - found[last].score > tolerance) break;
        }
        if (last == first + 1) continue;
        const double score = found[first].score;
        std::sort(found.begin() + first, found.begin() + last,
                  [](const Found& a, const Found& b) { return a.row < b.row; });
        for (size_t i = first; i < last; ++i) found[i].score = score;
    }
}

// Keeps the `size` best, and with a tolerance those that may tie with the last of them.
void keep_best(std::vector<Found>& found, int64_t size, double tolerance) {
    if ((int64_t)found.size() <= size) return;
    std::nth_element(found.begin(), found.begin() + size - 1, found.end(), better);
    const double limit = found[size - 1].score - tolerance;
    const auto end = std::partition(found.begin() + size, found.end(),
                                    [&](const Found& item) { return tolerance > 0 && item.score >= limit; });
    found.erase(end, found.end());
}

void answer(Query& query, int64_t number, std::vector<Found>& found) {
    const Cells& cells = *query.cells;
    const Search& search = *query.search;
    const int64_t num_allowed = search.num_allowed[number];
    const int64_t width = cells.width;
    bool complete = query.count == num_allowed;
    query.cut();
    complete = complete && query.count == num_allowed;
    found.resize(query.count);
    if (search.rescore) {
        constexpr int64_t kAhead = 8;
        for (int64_t i = 0; i < query.count; ++i) {
            if (i + kAhead < query.count) {
                const float* later = cells.vectors + query.slots[i + kAhead] * width;
                for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(later + j);
            }
            const int64_t row = query.slots[i];
            found[i] = {product(query.vector, cells.vectors + row * width, width), row};
        }
    } else {
        for (int64_t i = 0; i < query.count; ++i) found[i] = {query.scores[i], query.slots[i]};
    }
    search.touched[2 * number] = query.scanned;
    search.touched[2 * number + 1] = search.rescore ? query.count : 0;
    const int64_t size = search.rescore ? search.k : search.pool;
    const double tolerance = search.rescore ? search.tolerances[number] : 0;
    if (!search.rescore && query.count > size) complete = false;
    keep_best(found, size, 2 * tolerance);
    order(found, tolerance);
    const int64_t kept = std::min<int64_t>(size, found.size());
    for (int64_t i = 0; i < kept; ++i) {
        search.out_rows[number * search.out_stride + i] = found[i].row;
        search.out_scores[number * search.out_stride + i] = found[i].score;
    }
    double bound = -std::numeric_limits<double>::infinity();
    if (!complete) {
        // Of the items scanned and left out, none has a score by its code above the worst that was kept.
        const double worst = search.rescore || !kept ? (double)query.threshold : found[kept - 1].score;
        bound = worst + query.norm * cells.largest_error + query.code_error * cells.largest_code_norm + query.rounding();
        for (int64_t cell = 0; cell < cells.num_cells; ++cell) {
            if (query.keys[cell] == -kInfinity) continue;
            bound = std::max(bound, query.bases[cell] + query.norm * cells.radii[cell] + query.rounding());
        }
    }
    search.bounds[number] = bound;
}

using Scan = void (Query::*)(int64_t, const uint8_t*);

Scan scan_for(const Cells& cells) {
    if (cells.bits == 4) return cells.num_groups == 4 ? &Query::scan<4, 4> : &Query::scan<4, 0>;
    if (cells.num_groups == 8) return &Query::scan<8, 8>;
    if (cells.num_groups == 16) return &Query::scan<8, 16>;
    return &Query::scan<8, 0>;
}

const uint8_t* codes_of(const Cells& cells, int64_t cell) {
    return cells.codes + cells.starts[cell] * cells.num_groups * 64;
}

// One query or many at once: in rounds of ever more cells each, and within a round cell by cell, so that a cell's codes
// come from memory once for all who visit it. What a query finds does not depend on who else is in its group.
void search_group(const Cells& cells, const Search& search, int64_t first, int64_t last, std::vector<Query>& queries,
                  std::vector<Found>& found) {
    struct Visit {
        float key;
        int32_t cell, query;
    };
    const Scan scan = scan_for(cells);
    static thread_local std::vector<Visit> drawn, visits;
    static thread_local std::vector<int64_t> places;
    places.resize(cells.num_cells + 1);
    queries.resize(std::max<size_t>(queries.size(), last - first));
    for (int64_t number = first; number < last; ++number) queries[number - first].begin(cells, search, number);
    for (int64_t most = 4;; most *= 2) {
        drawn.clear();
        std::fill(places.begin(), places.end(), 0);
        for (int32_t i = 0; i < last - first; ++i) {
            // Nobody is asked again for the others' sake: every question cuts the candidates a little closer.
            if (queries[i].done) continue;
            queries[i].done = !queries[i].next_tier(most);
            if (queries[i].done) continue;
            for (const Ranked& next : queries[i].tier) {
                drawn.push_back({next.key, next.cell, i});
                ++places[next.cell + 1];
            }
        }
        if (drawn.empty()) break;
        for (int64_t cell = 0; cell < cells.num_cells; ++cell) places[cell + 1] += places[cell];
        visits.resize(drawn.size());
        for (const Visit& visit : drawn) visits[places[visit.cell]++] = visit;
        for (size_t i = 0; i < visits.size(); ++i) {
            Query& query = queries[visits[i].query];
            if (query.hopeless(visits[i].key)) continue;
            const bool turn = i + 1 < visits.size() && visits[i + 1].cell != visits[i].cell;
            (query.*scan)(visits[i].cell, turn ? codes_of(cells, visits[i + 1].cell) : nullptr);
        }
    }
    for (int64_t number = first; number < last; ++number) answer(queries[number - first], number, found);
}

constexpr int64_t kGroup = 128;

}  // namespace

extern "C" void freshet_search_cells(const FreshetCells* cells, const FreshetSearch* search, int64_t threads) {
    const int64_t queries = search->num_queries;
    if (queries == 0) return;
    const int64_t size = std::min(kGroup, (queries + threads - 1) / threads);
    freshet::parallel_tiles((queries + size - 1) / size, static_cast<int>(threads), [&](int64_t tile, int) {
        thread_local std::vector<Query> states;
        thread_local std::vector<Found> found;
        const int64_t first = tile * size, last = std::min(queries, first + size);
        search_group(*cells, *search, first, last, states, found);
    });
}
