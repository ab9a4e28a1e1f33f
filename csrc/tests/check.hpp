// A test program without a framework: TEST(name) { CHECK(...); } in any source registers itself.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagemill::tests {

struct Test {
    const char *name;
    void (*run)();
};

// Filled before main() by the TEST macro.
inline std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

struct Registration {
    Registration(const char *name, void (*run)()) { tests().push_back({name, run}); }
};

struct CheckFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(bool holds, const char *what, const char *file, int line) {
    if (!holds) throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Error, typename Call>
bool throws(Call call) {
    try {
        call();
    } catch (const Error &) {
        return true;
    }
    return false;
}

}  // namespace pagemill::tests

#define TEST(name)                                                                     \
    static void test_##name();                                                         \
    static const pagemill::tests::Registration registration_##name(#name, test_##name); \
    static void test_##name()

#define CHECK(condition) pagemill::tests::check(bool(condition), #condition, __FILE__, __LINE__)
