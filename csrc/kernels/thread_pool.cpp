#include "thread_pool.hpp"

#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace pagemill {
namespace {

// One parallel_run. `next` hands out items; whoever finds it at the end leaves.
struct Run {
    ItemFn fn;
    void *context;
    int64_t num_items;
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t i = next.fetch_add(1); i < num_items; i = next.fetch_add(1)) fn(context, i);
    }
};

// Threads that park between runs. A worker joins the open run under the mutex; the owner closes the
// run and waits only for those who joined, so a slow waker (or a forked child without workers)
// costs nothing but its help.
class OwnThreads {
  public:
    ~OwnThreads() { stop(); }

    void resize(int num_workers) {
        std::lock_guard<std::mutex> turn(turn_);
        if (static_cast<int>(workers_.size()) == num_workers) return;
        stop();
        for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { loop(); });
    }

    void run(Run &run) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return run.work();  // another caller has the workers
        open(&run);
        run.work();
        close();
    }

  private:
    void open(Run *run) {
        std::lock_guard<std::mutex> lock(mutex_);
        run_ = run;
        ++run_number_;
        wake_.notify_all();
    }

    void close() {
        std::unique_lock<std::mutex> lock(mutex_);
        run_ = nullptr;
        done_.wait(lock, [this] { return num_joined_ == 0; });
    }

    void loop() {
        std::unique_lock<std::mutex> lock(mutex_);
        uint64_t seen = 0;
        for (;;) {
            wake_.wait(lock, [&] { return stopping_ || (run_ && run_number_ != seen); });
            if (stopping_) return;
            seen = run_number_;
            Run *run = run_;
            ++num_joined_;
            lock.unlock();
            run->work();
            lock.lock();
            if (--num_joined_ == 0) done_.notify_all();
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            wake_.notify_all();
        }
        for (auto &worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    std::mutex turn_;  // one run at a time
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    Run *run_ = nullptr;
    uint64_t run_number_ = 0;
    int num_joined_ = 0;
    bool stopping_ = false;
};

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

std::atomic<GompParallel> gomp_parallel{nullptr};

int default_threads() {
    unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

std::atomic<int> &thread_count() {
    static std::atomic<int> count{default_threads()};
    return count;
}

// Never destroyed: at the exit of the process other threads may still be inside.
OwnThreads &own_threads() {
    static OwnThreads *threads = new OwnThreads;
    return *threads;
}

GompParallel entry_of(void *library) {
    return reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
}

#ifdef __linux__
// torch's wheels carry their runtime under a name of their own (libgomp-<hash>.so.1), loaded
// without RTLD_GLOBAL. libomp and libiomp5 answer to GOMP_parallel as well.
int find_loaded(dl_phdr_info *info, size_t, void *found) {
    const char *slash = info->dlpi_name ? std::strrchr(info->dlpi_name, '/') : nullptr;
    const char *name = slash ? slash + 1 : "";
    bool is_openmp = !std::strncmp(name, "libgomp", 7) || !std::strncmp(name, "libomp", 6) ||
                     !std::strncmp(name, "libiomp", 7);
    if (!is_openmp) return 0;
    void *library = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return 0;
    *static_cast<GompParallel *>(found) = entry_of(library);
    return *static_cast<GompParallel *>(found) != nullptr;
}
#endif

void work_in_team(void *run) { static_cast<Run *>(run)->work(); }

}  // namespace

bool adopt_openmp() {
    GompParallel entry = entry_of(RTLD_DEFAULT);
#ifdef __linux__
    if (!entry) dl_iterate_phdr(find_loaded, &entry);
#endif
    if (entry) gomp_parallel = entry;
    return gomp_parallel != nullptr;
}

const char *thread_runtime() { return gomp_parallel.load() ? "openmp" : "own"; }

int num_threads() { return thread_count(); }

void set_num_threads(int count) { thread_count() = count < 1 ? 1 : count; }

void parallel_run(int64_t num_items, ItemFn fn, void *context) {
    Run run{fn, context, num_items};
    int64_t wanted = num_threads() < num_items ? num_threads() : num_items;
    if (wanted <= 1) return run.work();
    if (GompParallel entry = gomp_parallel) {
        return entry(work_in_team, &run, static_cast<unsigned>(wanted), 0);
    }
    own_threads().resize(num_threads() - 1);
    own_threads().run(run);
}

}  // namespace pagemill
