// The instruction sets of this machine.
#pragma once

#include <string>
#include <vector>

namespace tvmify {

// LLVM's names of the instruction sets that this CPU has and its operating system lets programs
// use, among those that change which code is best; without tuning flags.
std::vector<std::string> cpu_features();

}  // namespace tvmify
