// Where ascending strings belong among other ascending strings.

#include <algorithm>
#include <cstdint>
#include <cstring>

// Mirrored by services/algorithms/ops/string_order/__init__.py.
struct FreshetStrings {
    const uint8_t* data;
    const void* ends;  // (count,) of int32 or int64
    int64_t count, bytes_per_end;
};

namespace {

int64_t end_of(const FreshetStrings& strings, int64_t row) {
    if (strings.bytes_per_end == 4) return static_cast<const int32_t*>(strings.ends)[row];
    return static_cast<const int64_t*>(strings.ends)[row];
}

bool is_less(const FreshetStrings& strings, int64_t row, const FreshetStrings& others, int64_t other) {
    const int64_t start = row ? end_of(strings, row - 1) : 0, size = end_of(strings, row) - start;
    const int64_t other_start = other ? end_of(others, other - 1) : 0, other_size = end_of(others, other) - other_start;
    const int order = std::memcmp(strings.data + start, others.data + other_start, std::min(size, other_size));
    return order ? order < 0 : size < other_size;
}

}  // namespace

extern "C" void freshet_rows_before(const FreshetStrings* strings, const FreshetStrings* others, int64_t* rows) {
    int64_t low = 0;
    for (int64_t other = 0; other < others->count; ++other) {
        int64_t high = low;
        for (int64_t step = 1; high < strings->count && is_less(*strings, high, *others, other); step *= 2) {
            low = high + 1;
            high += step;
        }
        high = std::min(high, strings->count);
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (is_less(*strings, middle, *others, other)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        rows[other] = low;
    }
}
