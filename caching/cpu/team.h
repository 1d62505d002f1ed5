// The threads that the CPU kernels work with, one for each core but the caller's.
//
// They are not XLA's: a step is dozens of kernels with microseconds between them, and to sleep and be woken each time
// costs a virtual machine 50 of them. A helper looks for the next loop a while before it sleeps.

#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace odriver {

constexpr int kHelped = 8;  // other threads' shares that a helper looks at: to look at all takes long where there are many
constexpr auto kPatience = std::chrono::microseconds(200);  // longer than the gaps within a step

// Tasks 0 to count - 1, each done once. A thread has a share of them, one after the other, so that it reads on where it was;
// then it helps some others with theirs, and the caller, who waits for the last one, all others.
struct Loop {
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  const std::function<void(int64_t)>& body;
  std::vector<Share> shares;
  std::atomic<int64_t> done{0};

  Loop(const std::function<void(int64_t)>& body, int64_t count, int threads) : body(body), shares(threads) {
    for (int64_t thread = 0; thread < threads; ++thread) {
      shares[thread].next.store(thread * count / threads, std::memory_order_relaxed);
      shares[thread].end = (thread + 1) * count / threads;
    }
  }

  void work(int thread) {
    const int threads = shares.size();
    for (int other = 0; other < (thread == 0 ? threads : std::min(threads, 1 + kHelped)); ++other) {
      Share& share = shares[(thread + other) % threads];
      for (int64_t task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        body(task);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }
};

class Team {
 public:
  Team() {
    cpu_set_t cores;
    const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
    size_ = known ? CPU_COUNT(&cores) : static_cast<int>(std::thread::hardware_concurrency());
    for (int helper = 1; helper < size_; ++helper) std::thread([this, helper] { help(helper); }).detach();
  }

  // The threads, the caller's among them.
  int size() const { return size_; }

  // Works on the loop until all its tasks are done. A helper that comes late finds none left and does not touch the body.
  void run(const std::function<void(int64_t)>& body, int64_t count) {
    auto loop = std::make_shared<Loop>(body, count, size_);
    if (count > 1) post(loop);
    loop->work(0);
    while (loop->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }

 private:
  void post(std::shared_ptr<Loop> loop) {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      loop_ = std::move(loop);
      posted_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load(std::memory_order_acquire)) wake_.notify_all();
  }

  void help(int thread) {
    for (int64_t seen = 0;;) {
      seen = await_other_than(seen);
      std::shared_ptr<Loop> loop;
      {
        const std::lock_guard<std::mutex> held(mutex_);
        loop = loop_;
      }
      loop->work(thread);
    }
  }

  int64_t await_other_than(int64_t seen) {
    const auto patience = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < patience) {
      for (int look = 0; look < 64; ++look)
        if (posted_.load(std::memory_order_acquire) != seen) return posted_.load(std::memory_order_acquire);
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> held(mutex_);
    asleep_.fetch_add(1, std::memory_order_release);
    wake_.wait(held, [&] { return posted_.load(std::memory_order_acquire) != seen; });
    asleep_.fetch_sub(1, std::memory_order_release);
    return posted_.load(std::memory_order_acquire);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Loop> loop_;          // under the mutex
  std::atomic<int64_t> posted_{0};      // loops so far; changed under the mutex
  std::atomic<int> asleep_{0};
  int size_;
};

// One team for the process, even of several libraries where GCC compiles them; its threads run until the process ends.
inline Team& team() {
  static Team& only = *new Team;
  return only;
}

// Calls body(task) for each task below `count`, on the calling thread and its helpers.
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  team().run(body, count);
}

}  // namespace odriver
