// Runs a loop on XLA's CPU thread pool from inside a blocking handler. Nothing here knows what the loop does.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

// Tasks [0, num_tasks) of one loop, taken in turn by whoever is free. The calling thread takes part and waits
// only for tasks that others have begun, so a pool whose threads are all busy (or all waiting here) cannot
// deadlock.
class SharedLoop {
 public:
  SharedLoop(int64_t num_tasks, const std::function<void(int64_t)>& task)
      : num_tasks_(num_tasks), task_(task) {}

  // Takes tasks until none is left. A helper that arrives late returns at once and never touches task_, which
  // belongs to the caller's stack.
  void work() {
    int64_t done = 0;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_; ++done) task_(i);
    if (done == 0) return;
    if (finished_.fetch_add(done, std::memory_order_acq_rel) + done == num_tasks_) {
      std::lock_guard<std::mutex> lock(mutex_);
      all_done_.notify_all();
    }
  }

  void wait() {
    constexpr int kSpins = 4000;  // a few microseconds: the usual imbalance between two threads
    for (int i = 0; i < kSpins; ++i) {
      if (finished_.load(std::memory_order_acquire) == num_tasks_) return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return finished_.load(std::memory_order_acquire) == num_tasks_; });
  }

 private:
  const int64_t num_tasks_;
  const std::function<void(int64_t)>& task_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> finished_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

inline void run_on_pool(xla::ffi::ThreadPool& pool, int64_t num_tasks,
                        const std::function<void(int64_t)>& task) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  auto loop = std::make_shared<SharedLoop>(num_tasks, task);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->work(); });
  loop->work();
  loop->wait();
}

}  // namespace jaxinfer
