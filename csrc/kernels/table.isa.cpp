// The entry points of one instruction set.
#include "kernels/entry_points.hpp"

namespace pagemill::PAGEMILL_ISA {

#define PAGEMILL_TEXT_OF(name) #name
#define PAGEMILL_TEXT(name) PAGEMILL_TEXT_OF(name)

const KernelTable &table() {
    static constexpr KernelTable entries = {
        PAGEMILL_TEXT(PAGEMILL_ISA),
        attention_scratch_floats,
        partial_floats,
        attend,
        merge,
        write_kv,
        write_raw,
        rotate,
        rms_norm,
        activate,
        kLinearStrip,
        kLinearTokens,
        linear_pack_floats,
        linear_pack,
        linear_bf16,
        pack_tokens,
        packed_scratch_floats,
        linear_packed,
        unpack_to_bf16,
        unpack_to_float,
        widen_bf16,
    };
    return entries;
}

}  // namespace pagemill::PAGEMILL_ISA
