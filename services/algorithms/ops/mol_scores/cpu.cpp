// Mixture-of-Logits scores on the CPU. Compiled once per instruction set (deploy/build_kernels.py).

#include "parallel.hpp"
#include "vector.hpp"

using namespace freshet;

// out[i] = exp(in[i]) for in <= 0 (function 0), saturated exp (1) or SiLU (2): so that tests reach vector.hpp.
extern "C" void freshet_elementwise(int function, const float* in, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        float lanes[kLanes] = {};
        const int64_t count = std::min<int64_t>(kLanes, size - i);
        std::memcpy(lanes, in + i, 4 * count);
        const Floats x = load(lanes);
        store(lanes, function == 0 ? exp_not_positive(x) : function == 1 ? exp_saturated(x) : silu(x));
        std::memcpy(out + i, lanes, 4 * count);
    }
}
