// Which instruction set runs: the best one of this processor, unless a test asks for another.
#include <atomic>
#include <cstring>
#ifdef PAGEMILL_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/kernel_table.hpp"

namespace pagemill {

namespace portable {
const KernelTable &table();
}
#ifdef PAGEMILL_X86
namespace avx2 {
const KernelTable &table();
}
namespace avx512 {
const KernelTable &table();
}
#endif
#ifdef PAGEMILL_AMX
namespace amx {
const KernelTable &table();
}
#endif

namespace {

struct Choice {
    const char *name;
    const KernelTable &(*table)();
    bool (*runs_here)();
};

bool always() { return true; }

#ifdef PAGEMILL_X86
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef PAGEMILL_AMX
// The kernel hands out the tile registers on request, for all threads of the process at once.
bool has_amx() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    constexpr uint32_t kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
    constexpr uint32_t kAvx512Bf16 = 1u << 5;
    uint32_t a, b, c, d, a1, rest;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!__get_cpuid_count(7, 1, &a1, &rest, &rest, &rest)) return false;
    if ((d & kTiles) != kTiles || !(a1 & kAvx512Bf16)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

constexpr Choice kChoices[] = {
// best first
#ifdef PAGEMILL_AMX
    {"amx", amx::table, has_amx},
#endif
#ifdef PAGEMILL_X86
    {"avx512", avx512::table, has_avx512},
    {"avx2", avx2::table, has_avx2},
#endif
    {"portable", portable::table, always},
};

const KernelTable *find(const char *name) {
    const bool any = !std::strcmp(name, "auto");
    for (const Choice &choice : kChoices) {
        if ((any || !std::strcmp(choice.name, name)) && choice.runs_here()) return &choice.table();
    }
    return nullptr;
}

std::atomic<const KernelTable *> &chosen() {
    static std::atomic<const KernelTable *> table{find("auto")};
    return table;
}

}  // namespace

const KernelTable &kernels() { return *chosen().load(std::memory_order_acquire); }

const char *available_isa(int index) {
    for (const Choice &choice : kChoices) {
        if (choice.runs_here() && index-- == 0) return choice.name;
    }
    return nullptr;
}

bool set_isa(const char *name) {
    const KernelTable *table = find(name);
    if (table) chosen().store(table, std::memory_order_release);
    return table != nullptr;
}

const char *isa_name() { return kernels().name; }

}  // namespace pagemill
