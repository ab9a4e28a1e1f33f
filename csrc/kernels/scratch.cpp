#include "kernels/scratch.hpp"

#include <memory>
#include <new>

namespace pagemill {
namespace {

constexpr std::align_val_t kLine{64};

struct Release {
    void operator()(float *memory) const { operator delete(memory, kLine); }
};

struct Scratch {
    std::unique_ptr<float, Release> memory;
    int64_t num_floats = 0;

    float *get(int64_t wanted) {
        if (wanted > num_floats) {
            memory.reset();
            void *fresh = operator new(static_cast<size_t>(wanted) * sizeof(float), kLine);
            memory.reset(static_cast<float *>(fresh));
            num_floats = wanted;
        }
        return memory.get();
    }
};

}  // namespace

float *thread_scratch(int64_t num_floats) {
    thread_local Scratch scratch;
    return scratch.get(num_floats);
}

float *caller_scratch(int64_t num_floats) {
    thread_local Scratch scratch;
    return scratch.get(num_floats);
}

}  // namespace pagemill
