#include "cpu_features.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tvmify {

#if defined(__x86_64__)

namespace {

// Whether the kernel grants AMX registers to a process that requests them, as oneDNN does; our own
// code does not use them.
bool gives_tiles() {
  constexpr int kGetSupported = 0x1021;           // ARCH_GET_XCOMP_SUPP
  constexpr unsigned long kTiles = 0b11UL << 17;  // their configuration and their contents
  unsigned long supported = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 && (supported & kTiles) == kTiles;
}

}  // namespace

std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  __builtin_cpu_init();
#define TVMIFY_ADD(name) \
  if (__builtin_cpu_supports(name)) names.emplace_back(name)
  TVMIFY_ADD("sse3");
  TVMIFY_ADD("ssse3");
  TVMIFY_ADD("sse4.1");
  TVMIFY_ADD("sse4.2");
  TVMIFY_ADD("popcnt");
  TVMIFY_ADD("bmi");
  TVMIFY_ADD("bmi2");
  TVMIFY_ADD("lzcnt");
  TVMIFY_ADD("f16c");
  TVMIFY_ADD("fma");
  TVMIFY_ADD("avx");
  TVMIFY_ADD("avx2");
  TVMIFY_ADD("avxvnni");
  TVMIFY_ADD("avx512f");
  TVMIFY_ADD("avx512cd");
  TVMIFY_ADD("avx512bw");
  TVMIFY_ADD("avx512dq");
  TVMIFY_ADD("avx512vl");
  TVMIFY_ADD("avx512vbmi");
  TVMIFY_ADD("avx512vnni");
  TVMIFY_ADD("avx512bf16");
  TVMIFY_ADD("avx512fp16");
  if (gives_tiles()) TVMIFY_ADD("amx-bf16");
#undef TVMIFY_ADD
  return names;
}

#elif defined(__aarch64__)

std::vector<std::string> cpu_features() {
  struct Feature {
    unsigned long type, bit;
    const char* name;
  };
  static constexpr Feature kFeatures[] = {
      {AT_HWCAP, HWCAP_ASIMD, "neon"},       {AT_HWCAP, HWCAP_ATOMICS, "lse"},
      {AT_HWCAP, HWCAP_ASIMDHP, "fullfp16"}, {AT_HWCAP, HWCAP_ASIMDDP, "dotprod"},
      {AT_HWCAP, HWCAP_SVE, "sve"},          {AT_HWCAP2, HWCAP2_SVE2, "sve2"},
      {AT_HWCAP2, HWCAP2_I8MM, "i8mm"},      {AT_HWCAP2, HWCAP2_BF16, "bf16"},
  };
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    if (getauxval(feature.type) & feature.bit) names.emplace_back(feature.name);
  }
  return names;
}

#else

std::vector<std::string> cpu_features() { return {}; }

#endif

}  // namespace tvmify
