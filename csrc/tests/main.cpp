// Runs all registered tests, or those whose name contains the first argument.
#include <cstring>
#include <exception>

#include "tests/check.hpp"

int main(int argc, char **argv) {
    int num_run = 0, num_failed = 0;
    for (const auto &test : pagemill::tests::tests()) {
        if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
        ++num_run;
        try {
            test.run();
        } catch (const std::exception &error) {
            ++num_failed;
            std::printf("FAILED %s: %s\n", test.name, error.what());
        }
    }
    std::printf("%d tests, %d failed\n", num_run, num_failed);
    return num_failed > 0 || num_run == 0;
}
