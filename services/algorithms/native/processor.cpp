// Which instruction set the running processor has; compiled for any processor, so that it can be asked first.

extern "C" int freshet_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
    return avx512 ? 2 : avx2 ? 1 : 0;
#else
    return 0;
#endif
}
