// The instruction sets of this machine.
#pragma once

#include <string>
#include <vector>

namespace tvmify {

// The architecture, as in LLVM's target triples.
#if defined(__x86_64__)
constexpr const char* kArchitecture = "x86_64";
#elif defined(__aarch64__)
constexpr const char* kArchitecture = "aarch64";
#else
constexpr const char* kArchitecture = "unknown";
#endif

// LLVM's names of the instruction sets that the CPU and the operating system support, among those
// that affect which code is best; without tuning flags.
std::vector<std::string> cpu_features();

}  // namespace tvmify
