// A broken promise of a caller or of the cache itself: Python sees an AssertionError with words.
#pragma once

#include <stdexcept>
#include <string>

namespace pagemill::cache {

struct Bug : std::logic_error {
    using std::logic_error::logic_error;
};

[[noreturn]] inline void bug(const std::string &words) { throw Bug(words); }

}  // namespace pagemill::cache
